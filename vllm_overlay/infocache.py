"""Facts about an installed vLLM that are slow to find, kept under HOME/info until it changes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@functools.lru_cache(maxsize=8)
def tree_identity(root: Path) -> str:
    """Return a digest of the name, size and time of all code below ``root``/vllm, in milliseconds.

    Contents are not read: 3,000 files would take seconds at every start.
    """
    digest = hashlib.sha256(str(root.resolve()).encode())
    for path, info in _files(str(root / "vllm")):
        digest.update(f"\0{path}\0{info.st_size}\0{info.st_mtime_ns}".encode())
    return digest.hexdigest()


def _files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                yield from _files(entry.path)
            elif entry.name.endswith((".py", ".so")):
                yield entry.path, entry.stat()


def digest(data: bytes) -> str:
    """Return the SHA-256 of ``data`` in hex."""
    return hashlib.sha256(data).hexdigest()


def key(*parts: str) -> str:
    """Return a short digest of the parts, fit for a file name."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def load(file: Path) -> object:
    """Return the JSON in ``file``, or None if there is none that can be read."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None


def save(file: Path, value: object) -> None:
    """Write ``value`` so that a reader sees the whole of it or nothing.

    A folder that cannot be written costs time at the next call and nothing else, so it is no error.
    """
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump(value, out)
            Path(name).replace(file)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
