"""Starts a real server with `vllm-overlay serve`, waits for it, and stops it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from vllm_overlay.folders import FOLDER_VARIABLES, home_folder

COMMAND = str(Path(sys.executable).parent / "vllm-overlay")
MODELS = home_folder(os.environ) / "models"
START_SECONDS = 400


@dataclass(frozen=True)
class Server:
    """A serving vLLM. ``pid`` is the API server, ``plan`` the path of its plan."""

    url: str
    home: Path
    plan: Path
    pid: int
    process: subprocess.Popen[bytes]
    log: Path

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the overlay against this server's state folder."""
        return cli(*arguments, home=self.home)

    def children(self) -> list[psutil.Process]:
        """Return every process below the API server."""
        return psutil.Process(self.pid).children(recursive=True)


def environment(home: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment without anything of vLLM's from outside."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("VLLM_") and name != "PYTHONDONTWRITEBYTECODE"
    }
    assert not set(FOLDER_VARIABLES) & set(kept)
    folders = {"VLLM_OVERLAY_HOME": str(home), "VLLM_OVERLAY_MODELS": str(MODELS)}
    return {**kept, **folders, **(env or {})}


def cli(
    *arguments: str, home: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `vllm-overlay` with a state folder of its own."""
    return subprocess.run(
        [COMMAND, *arguments],
        env=environment(home, env),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(
    recipe: str, home: Path, *extra: str, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Serve a recipe on a free port until the block ends. A process that outlives it fails."""
    port = free_port()
    log = home / f"serve-{port}.log"
    share_facts(home)
    command = [COMMAND, "serve", recipe, "--", "--port", str(port), *extra]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment(home, env),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_healthy(url, process, log)
        (run,) = home.glob(f"plans/*/runs/{process.pid}-*.json")
        yield Server(url, home, run.parent.parent / "plan.json", process.pid, process, log)
    finally:
        left = stop(process)
    assert not left, f"left by the server, and killed: {left}"


def share_facts(home: Path) -> None:
    """Let a new state folder know what this machine's does of the installed vLLM.

    To find it out takes several imports of vLLM. Its files are named by what they are about.
    """
    shared = home_folder(os.environ) / "info"
    shared.mkdir(parents=True, exist_ok=True)
    home.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (home / "info").symlink_to(shared)


def wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until vLLM answers; fail at once when it ends before."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}:\n{tail(log)}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
    raise AssertionError(f"not healthy after {START_SECONDS} s:\n{tail(log)}")


def tail(log: Path, lines: int = 40) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def stop(process: subprocess.Popen[bytes]) -> list[str]:
    """Stop a server as a supervisor does; kill what is left of its session, and return that."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        main = psutil.Process(process.pid)
        family = [main, *main.children(recursive=True)]
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=10)
    left = words(alive)
    for item in alive:
        item.kill()
    process.wait(timeout=30)
    return left


def chat(url: str, question: str, **options: object) -> httpx.Response:
    """Ask the demo model one question, greedily."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 32,
        **options,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def words(names: Sequence[psutil.Process]) -> list[str]:
    """Return the command lines of processes, for a failing test's message."""
    return [" ".join(item.cmdline()) for item in names if item.is_running()]
