"""A made-up node: processes that look like vLLM's, their receipts, and a run record."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_overlay.activate.receipt import process_key, process_title, role_of, write_atomic
from vllm_overlay.runs import Run, find_run

READY = "print('ready', flush=True); import time; time.sleep(600)"
# A Python without the overlay: plans that only pose as such would end the environment's own.
BARE: str = getattr(sys, "_base_executable", sys.executable)
FIXES = {"overlay-route": ("vllm.a", "vllm.b"), "other": ("vllm.c",)}


def wait_for(
    condition: Callable[[], Any], what: str, seconds: float = 30, *, every: float = 0.02
) -> Any:
    """Return the condition's first true value, looking for it ``every`` so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(every)
    return value


@contextmanager
def program(
    *command: str | Path, env: Mapping[str, str] | None = None, name: str | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a program until the block ends; it says ``ready`` first. ``name`` becomes its argv[0]."""
    words = [str(word) for word in command]
    process = subprocess.Popen(
        [name or words[0], *words[1:]],
        executable=words[0],
        env={"PATH": os.environ["PATH"], **(env or {})},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@dataclass
class Node:
    """A state folder with one plan, and a view of /proc that shows only this test's processes.

    Other tests and servers of this machine must not count here.
    """

    root: Path
    port: int = 1
    digest: str = "a" * 64
    expect: list[dict[str, str]] = field(default_factory=list)
    serve: dict[str, Any] = field(default_factory=dict)
    fixes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict(FIXES))

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def proc(self) -> Path:
        return self.root / "proc"

    @property
    def folder(self) -> Path:
        return self.home / "plans" / self.digest

    @property
    def environ(self) -> dict[str, str]:
        return {"VLLM_OVERLAY_PLAN": str(self.folder / "plan.json")}

    def see(self, pid: int) -> None:
        """Let the view of /proc show a process."""
        self.proc.mkdir(parents=True, exist_ok=True)
        (self.proc / str(pid)).symlink_to(f"/proc/{pid}")

    @contextmanager
    def process(
        self,
        title: str,
        *,
        receipt: bool = True,
        env: Mapping[str, str] | None = None,
        **changed: Any,
    ) -> Iterator[int]:
        """Run a process with that title; ``changed`` are keys of its receipt."""
        environ = self.environ if env is None else env
        with program(sys.executable, "-c", READY, env=environ, name=title) as process:
            self.see(process.pid)
            if receipt:
                self.write_receipt(process.pid, **changed)
            yield process.pid

    def write_receipt(self, pid: int, /, **changed: Any) -> Path:
        """Write what activation would write for that process."""
        pid, start = process_key(pid)
        title = process_title(pid)
        record = {
            "schema": 1,
            "host": os.uname().nodename,
            "pid": pid,
            "start": start,
            "ppid": os.getpid(),
            "title": title,
            "role": role_of(title),
            "rank": None,
            "plan": self.digest,
            "environment": "e",
            "updated": "2026-01-01T00:00:00Z",
            "fixes": [
                {"name": name, "state": "applied", "modules": dict.fromkeys(modules, "applied")}
                for name, modules in self.fixes.items()
            ],
            **changed,
        }
        path = self.folder / "receipts" / f"{pid}-{start}.json"
        write_atomic(str(path), record)
        return path

    def write_run(self, pid: int, **changed: Any) -> Path:
        """Write the plan, and the run record that ``serve`` would leave for that process."""
        plan = {
            "digest": self.digest,
            "serve": self.serve,
            "smoke": {"expect": self.expect},
            "fixes": [
                *({"name": name, "verdict": "apply"} for name in self.fixes),
                {"name": "left-out", "verdict": "off"},
            ],
        }
        write_atomic(str(self.folder / "plan.json"), plan)
        pid, start = process_key(pid)
        record = {
            "schema": 1,
            "host": os.uname().nodename,
            "pid": pid,
            "start": start,
            "plan": self.digest,
            "bind_host": None,
            "port": self.port,
            "served_model": "demo",
            "started": "2026-01-01T00:00:00Z",
            "recipe": "demo",
            "smoke": {},
            **changed,
        }
        path = self.folder / "runs" / f"{pid}-{start}.json"
        write_atomic(str(path), record)
        return path

    def write_failure(self, pid: int, start: int, line: str, **more: object) -> Path:
        """Write what activation leaves when it ends a process."""
        path = self.folder / "failures" / f"{pid}-{start}.json"
        write_atomic(str(path), {"schema": 1, "pid": pid, "start": start, "line": line, **more})
        return path


def run_of(node: Node) -> Run:
    """Return the node's live server, as the commands find it."""
    run = find_run(node.home, node.port)
    assert run is not None
    return run
