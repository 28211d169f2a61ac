"""A server as a child of this process: started, waited for, and stopped with all its processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import httpx
import psutil

from vllm_overlay.errors import EXIT_FAILED

DRAIN_SECONDS = 90  # more than a recipe's usual shutdown-timeout
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL = 0.5  # seconds between two looks at a server that starts


class EndedError(Exception):
    """The server ended by itself. ``status`` is its exit status, as a shell shows it."""

    def __init__(self, status: int) -> None:
        self.status = shell_status(status)
        super().__init__(f"the server ended with exit status {self.status}")


@contextmanager
def interruptible() -> Iterator[None]:
    """Have Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, once: the rest is cleaning up."""
    before = {number: signal.signal(number, _interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let no signal break into the block; one that came in it interrupts at its end."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


@contextmanager
def background(
    command: Sequence[str | Path], log: Path, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends; its output goes to ``log``, and nothing of it is left.

    It has a session of its own: Ctrl-C reaches this process alone, which then stops the server.
    """
    server: subprocess.Popen[bytes] | None = None
    try:
        with _signals_held(), log.open("w") as out:
            server = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        yield server
    finally:
        if server is not None:
            with _signals_held():
                _stop(server)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Let the server drain, and leave none of its processes behind."""
    if server.poll() is None:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=DRAIN_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def wait_up(
    server: subprocess.Popen[bytes], url: str, waiting: Callable[[], None] = lambda: None
) -> None:
    """Wait until this server is up at ``url``; ``waiting`` is called now and then.

    Raises EndedError if it ends before.
    """
    while not answers(server.pid, url):
        with suppress(subprocess.TimeoutExpired):
            raise EndedError(server.wait(timeout=POLL))
        waiting()


def answers(pid: int, url: str) -> bool:
    """Tell whether the process ``pid`` listens on the port of ``url`` and calls itself healthy.

    Another server on that port does not count.
    """
    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    port = httpx.URL(url).port
    if not any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets):
        return False
    try:
        return httpx.get(f"{url}/health", timeout=5, verify=False).status_code == 200
    except httpx.HTTPError:
        return False


def shell_status(status: int) -> int:
    """Return a child's exit status as a shell shows it; one that ended at all has failed."""
    return 128 - status if status < 0 else status or EXIT_FAILED


def last_lines(log: Path, count: int) -> str:
    """Return the last lines of a log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return "\n".join(lines[-count:])


def log_file(home: Path, name: str) -> Path:
    """Return the log of that name in the state folder ``home``; its folder is there."""
    folder = home / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.log"
