"""Reading a user's files: regular, of bounded size, and inside the folder they belong to."""

from __future__ import annotations

from pathlib import Path

from vllm_overlay.errors import ConfigError

MAX_BYTES = 256 * 1024


def read_bytes(file: Path, limit: int = MAX_BYTES) -> bytes:
    """Return a regular file's bytes; ConfigError if it is none, unreadable or above ``limit``."""
    try:
        if not file.is_file():
            what = "this is not a regular file" if file.exists() else "there is no such file"
            raise ConfigError(what, file=file)
        with file.open("rb") as stream:
            data = stream.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the file cannot be read: {reason}", file=file) from None
    if len(data) > limit:
        raise ConfigError(
            "the file is too large", file=file, expected=f"at most {limit // 1024} KiB"
        )
    return data


def inside(folder: Path, relative: str) -> Path | None:
    """Return the file ``relative`` of ``folder``, or None if it leads out of it, symlinks too."""
    try:
        file = folder / relative
        if file.resolve().is_relative_to(folder.resolve()):
            return file
    except (OSError, RuntimeError, ValueError):  # too long a name, a loop of links, a NUL
        pass
    return None
