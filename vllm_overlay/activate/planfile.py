"""The plan's file: JSON whose first key is the digest of all the rest.

Checked byte by byte, so that a process that never imports vLLM need not load a JSON parser.
"""

from __future__ import annotations

import os

from vllm_overlay.activate.failure import refuse

HEAD = b'{\n "digest": "'
TAIL = b'",\n'
HEX = 64
REMEDY = "start the server with `vllm-overlay serve`, which writes the plan"


def sha256(data: bytes) -> str:
    """Return the hex SHA-256. The built-in module: hashlib would load OpenSSL at every start."""
    for name in ("_sha2", "_sha256", "hashlib"):  # of Python 3.12, of 3.11, of any
        try:
            module = __import__(name)
        except ImportError:
            continue
        digest: str = module.sha256(data).hexdigest()
        return digest
    raise ImportError("this Python has no SHA-256")


def with_digest(text: bytes) -> tuple[str, bytes]:
    """Return the digest of a plan and its file; ``text`` is JSON that begins with ``{`` and LF."""
    digest = sha256(text)
    return digest, HEAD + digest.encode() + TAIL + text[2:]


def read_plan(path: str) -> bytes:
    """Return a plan's file, once its digest is that of its text and of its folder's name.

    A file that is missing, torn or altered ends the process.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        refuse(f"the plan {path} cannot be read", found=error, remedy=REMEDY)
    start, end = len(HEAD), len(HEAD) + HEX
    if not data.startswith(HEAD) or data[end : end + len(TAIL)] != TAIL:
        refuse(f"the plan {path} cannot be read", found="no plan in it", remedy=REMEDY)
    stated = data[start:end].decode("ascii", "replace")
    digest = sha256(b"{\n" + data[end + len(TAIL) :])
    named = os.path.basename(os.path.dirname(os.path.abspath(path)))
    if not digest == stated == named:
        found = f"{digest} (the file says {stated})"
        refuse(
            f"the plan {path} was altered", expected=f"digest {named}", found=found, remedy=REMEDY
        )
    return data
