"""Loads the CUDA library for a device, or says why Triton is used. torch only inside functions.

The library is a plain C one: ctypes calls it, and no release of torch matters to it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vllm_overlay.kda.files import FOLDER, NoLibrary, read

ABI = 2  # what kda_step_abi() of step.cu must return


SIZE, WINDOW = 128, 8  # step.cu: the head size, and the longest window
POINTERS = (
    *("q", "k", "v", "gate", "beta", "a_log", "gate_bias", "state", "corrections", "keys", "gates"),
    *("out", "start", "block", "write_row", "fold_len", "fold_row"),
)
STRIDES = (
    *("q_token", "k_token", "v_token", "gate_token", "beta_token", "out_token"),
    *("state_block", "block_stride"),
    *("correction_row", "correction_head", "correction_token"),
    *("key_row", "key_head", "key_token", "gate_row", "gate_head", "gate_record_token"),
)
NUMBERS = ("bounded", "unit", "state_bf16", "out_fp32", "heads", "rows", "window", "scratch_row")


class Arguments(ctypes.Structure):
    """What kda_step_launch takes: ``KdaStepArgs`` of step.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in STRIDES),
        ("lower_bound", ctypes.c_float),
        *((name, ctypes.c_int32) for name in NUMBERS),
    )


@dataclass(frozen=True)
class Native:
    """A loaded library; ``arch`` is the code that the device runs: sm_90, or compute_100 (PTX)."""

    path: Path
    sha256: str
    arch: str
    handle: ctypes.CDLL = field(repr=False, compare=False)

    def misfit(self, window: Any, state: Any, records: Any, out: Any) -> str:
        """Return why the library has no kernel for such operands, which ``verify`` has checked.

        It has one, and returns nothing, for heads of 128, at most 8 tokens a window, bf16
        activations, parts that begin at multiples of 16 bytes, as what copies them in the
        background wants, and a GPU with room for a block.
        """
        import torch

        if (window.key_size, window.value_size) != (SIZE, SIZE) or window.size > WINDOW:
            return f"heads of {window.key_size} and {window.value_size}, windows of {window.size}"
        activations = {name: getattr(window, name) for name in ("q", "k", "v", "gate")}
        for name, x in (activations | {"beta": window.beta}).items():
            if x.dtype != torch.bfloat16:
                return f"{name} of {x.dtype}"
        for name, x in {"out": out, "state": state}.items():
            if x.dtype not in (torch.bfloat16, torch.float32):
                return f"{name} of {x.dtype}"
        limit = torch.cuda.get_device_properties(window.q.device).shared_memory_per_block_optin
        if self.handle.kda_step_shared_bytes(state.dtype == torch.bfloat16) > limit:
            return f"a state of {state.dtype} with {limit} bytes of shared memory"
        kept = {f"the records' {x}": getattr(records, x) for x in ("corrections", "keys", "gates")}
        for name, x in {**activations, "out": out, "state": state, **kept}.items():
            axes = slice(0, 3) if name in kept else slice(0, 1) if x is state else slice(1, 2)
            if not _aligned(x, x.stride()[axes]):
                return f"{name} where not each part begins at a multiple of 16 bytes"
        return ""

    def fold_verify(
        self,
        window: Any,
        state: Any,
        records: Any,
        write_rows: Any,
        scratch_row: int,
        folds: Any,
        out: Any,
    ) -> Any:
        """Fold and verify as ``verify.fold_verify`` does; the operands are no ``misfit``.

        Raises RuntimeError if CUDA does not launch the kernel.
        """
        import torch

        arguments = _arguments(window, state, records, write_rows, scratch_row, folds, out)
        with torch.cuda.device(window.q.device):
            stream = torch.cuda.current_stream().cuda_stream
            code = self.handle.kda_step_launch(ctypes.byref(arguments), stream)
        if code:
            what = self.handle.kda_step_error(code).decode()
            sizes = f"{window.rows} rows of {window.heads} heads"
            raise RuntimeError(f"KDA verify: {self.path} cannot run {sizes}: {what}")
        return out


def _aligned(x: Any, steps: Sequence[int]) -> bool:
    """Tell whether parts of a tensor, these numbers of elements apart, lie at multiples of 16."""
    return x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in steps)


def _arguments(
    window: Any,
    state: Any,
    records: Any,
    write_rows: Any,
    scratch_row: int,
    folds: Any,
    out: Any,
) -> Arguments:
    import torch

    tensors = (
        *(window.q, window.k, window.v, window.gate, window.beta, window.a_log, window.gate_bias),
        *(state, records.corrections, records.keys, records.gates, out),
        *(window.start_loc, window.blocks, write_rows, folds.lens, folds.rows),
    )
    by_token = (window.q, window.k, window.v, window.gate, window.beta, out)
    return Arguments(
        *(x.data_ptr() for x in tensors),
        *(x.stride(1) for x in by_token),
        state.stride(0),
        window.blocks.stride(0),
        *(records.corrections.stride()[:3]),
        *(records.keys.stride()[:3]),
        *(records.gates.stride()[:3]),
        window.lower_bound or 0.0,
        window.lower_bound is not None,
        records.unit,
        state.dtype == torch.bfloat16,
        out.dtype == torch.float32,
        window.heads,
        window.rows,
        window.size,
        scratch_row,
    )


@cache
def look(capability: tuple[int, int], folder: Path) -> Native | str:
    """Return the library of a folder for a GPU of that compute capability, or why there is none.

    Looked for once in each process: what changes on disk later does not change what runs.
    """
    try:
        built = read(folder)
        arch = built.code_for(capability)
        return Native(built.path, built.sha256, arch, _load(built.path))
    except NoLibrary as error:
        return str(error)


def _load(path: Path) -> ctypes.CDLL:
    try:
        handle = ctypes.CDLL(str(path))
        abi, launch = handle.kda_step_abi, handle.kda_step_launch
        shared_bytes, error_text = handle.kda_step_shared_bytes, handle.kda_step_error
    except (OSError, AttributeError) as error:
        raise NoLibrary(f"{path} cannot be loaded: {error}") from None
    abi.restype, abi.argtypes = ctypes.c_int, ()
    shared_bytes.restype, shared_bytes.argtypes = ctypes.c_int, (ctypes.c_int,)
    error_text.restype, error_text.argtypes = ctypes.c_char_p, (ctypes.c_int,)
    launch.restype = ctypes.c_int
    launch.argtypes = (ctypes.POINTER(Arguments), ctypes.c_void_p)
    found = abi()
    if found != ABI:
        raise NoLibrary(f"{path} has ABI {found}, and {ABI} is wanted: build it again")
    return handle


def _look_for(device: Any) -> Native | str:
    import torch

    kind = torch.device(device).type
    if kind != "cuda" or torch.version.cuda is None:
        return f"no CUDA library for {kind if torch.version.hip is None else 'ROCm'}"
    return look(torch.cuda.get_device_capability(device), FOLDER)


def library(device: Any) -> Native | None:
    """Return the library for a torch device, or None: ``form`` says why."""
    found = _look_for(device)
    return None if isinstance(found, str) else found


def form(device: Any) -> str:
    """Return what a device runs, for a receipt: ``cuda sm_90 0123456789ab`` or ``triton: why``."""
    found = _look_for(device)
    return (
        f"triton: {found}" if isinstance(found, str) else f"cuda {found.arch} {found.sha256[:12]}"
    )


def identity() -> str:
    """Return the sha256 of the library that this process would run, or ``none``.

    For its current GPU, if torch has one in use here; else for any. Imports no torch.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found = library("cuda")
        return found.sha256 if found else "none"
    try:
        return read(FOLDER).sha256
    except NoLibrary:
        return "none"
