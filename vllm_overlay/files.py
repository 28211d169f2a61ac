"""Reading a user's files: regular, of bounded size, and inside the folder they belong to."""

from __future__ import annotations

from pathlib import Path

from vllm_overlay.errors import ConfigError

MAX_BYTES = 256 * 1024


def is_file(file: Path) -> bool:
    """Tell whether this is a regular file; ConfigError if a folder on the way is not readable."""
    try:
        return file.is_file()
    except PermissionError as error:
        raise unreadable(file, error) from None
    except (OSError, ValueError):  # too long a name, or a NUL in it
        return False


def read_bytes(file: Path, limit: int = MAX_BYTES) -> bytes:
    """Return a regular file's bytes; ConfigError if it is none, unreadable or above ``limit``."""
    if not is_file(file):
        raise ConfigError("there is no such regular file", file=file)
    try:
        with file.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise unreadable(file, error) from None
    if len(data) > limit:
        raise ConfigError(
            "the file is too large", file=file, expected=f"at most {limit // 1024} KiB"
        )
    return data


def unreadable(path: Path, error: OSError) -> ConfigError:
    """Return the refusal of a file or folder that the system does not let us read."""
    return ConfigError(f"this cannot be read: {error.strerror}", file=path)


def inside(folder: Path, relative: str) -> Path | None:
    """Return the file ``relative`` of ``folder``, or None if it leads out of it, symlinks too."""
    try:
        file = folder / relative
        if file.resolve().is_relative_to(folder.resolve()):
            return file
    except (OSError, RuntimeError, ValueError):  # too long a name, a loop of links, a NUL
        pass
    return None
