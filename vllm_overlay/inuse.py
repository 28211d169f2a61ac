"""Which plans have a server, told by the kernel: a lock ends with the process that holds it.

A record of a process says nothing about one in another container or on another node that has the
same state folder; a lock on a file of that folder does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from vllm_overlay.errors import ConfigError
from vllm_overlay.processes import PROC, alive
from vllm_overlay.receipts import NAME, read

LOCK = "lock"  # a file of the state folder, and of each plan's folder


def hold(folder: Path, *, while_serving: bool) -> None:
    """Lock ``folder`` until this process ends or, not ``while_serving``, becomes vLLM.

    Waits for a removal that is going on. A folder that cannot be locked is no error: the writes
    that follow say what is wrong with it, and run records tell of this node's servers.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_SH)
        os.utime(handle)  # its time says when the plan was last used
        os.set_inheritable(handle, while_serving)


@contextlib.contextmanager
def alone(home: Path) -> Iterator[None]:
    """Keep servers from starting while the block runs. Raises ConfigError if one does just now."""
    try:
        handle = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            "the state folder cannot be written", file=home, found=error.strerror
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise ConfigError(
            "the state folder is busy",
            file=home,
            found="a server that starts" if isinstance(error, BlockingIOError) else error.strerror,
            remedy="try again",
        ) from None
    try:
        yield
    finally:
        os.close(handle)


def in_use(plan: Path, proc: Path = PROC) -> bool:
    """Return whether a server has the plan of the folder ``plan``, or a process of one is left."""
    return _held(plan / LOCK) or bool(live_pids(plan, proc))


def live_pids(plan: Path, proc: Path = PROC) -> set[int]:
    """Return the processes of this node that live and have left a record in a plan's folder."""
    here = os.uname().nodename
    named = [NAME.fullmatch(path.name) for path in (plan / "runs").glob("*.json")]
    found = [(int(match[1]), int(match[2])) for match in named if match]
    found += [(item.pid, item.start) for item in read(plan) if item.host in ("", here)]
    return {pid for pid, start in found if alive(pid, start, proc)}


def _held(lock: Path) -> bool:
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's: it cannot be told, so nothing of it is touched
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(handle)
    return False
