"""Files of the plan: read, and held against the digests that the plan names."""

from __future__ import annotations

from vllm_overlay.activate.failure import refuse
from vllm_overlay.activate.planfile import sha256

REINSTALL = "restart with `vllm-overlay serve`, which resolves the recipe anew"


def read(path: str, fix: str, module: str) -> bytes:
    """Return a file's bytes; a file that cannot be read ends the process."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        refuse(
            "a source of the plan cannot be read",
            fix=fix,
            module=module,
            expected=path,
            found=error,
            remedy=REINSTALL,
        )


def check(data: bytes, digest: str, path: str, fix: str, module: str) -> None:
    """End the process if a file is not the one that the plan was resolved against."""
    found = sha256(data)
    if found != digest:
        refuse(
            f"{path} changed since the plan was made",
            fix=fix,
            module=module,
            expected=f"sha256 {digest[:16]}",
            found=f"sha256 {found[:16]}",
            remedy=REINSTALL,
        )


def place_of(error: BaseException) -> str:
    """Return where an exception was raised, as ` at file:line`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
