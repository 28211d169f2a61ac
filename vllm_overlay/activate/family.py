"""What the main process owes its children, and a supervisor: it is the one that `serve` became."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time

from vllm_overlay.activate import failure
from vllm_overlay.activate.receipt import process_key
from vllm_overlay.activate.state import State
from vllm_overlay.activate.statement import PATIENCE, run_record

TYPE_CHECKING = False  # importing typing costs more than the rest of the start
if TYPE_CHECKING:
    from typing import Any

GRACE = 5.0  # seconds between SIGTERM and SIGKILL


def lead(state: State) -> None:
    """Make this process end its children if it is refused, and tell if one of them was."""
    pid, start = process_key()

    node = (run_record(state.folder) or {}).get("node")
    watch = None
    if node and node["nnodes"]:
        from vllm_overlay.activate.watch import begin

        watch = begin(state, node)

    def leave() -> None:
        if os.getpid() != pid:
            return
        if watch is not None and watch.ending:
            watch.leave()
        if failures := refused_since(state.folder, start):
            try:
                tell_head(state.folder, failures)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(failure.EXIT_CONFIG)
        if not os.access(f"{state.folder}/plan.json", os.R_OK):
            os._exit(failure.EXIT_CONFIG)  # who missed it could not record that it was refused
        if watch is not None:
            watch.leave()

    def end(line: str) -> None:
        if os.getpid() == pid:
            end_children()
            tell_head(state.folder, refused_since(state.folder, start))

    # vLLM turns the end of a worker or of EngineCore into status 1, and a supervisor must be able
    # to tell a refused configuration from a crash.
    atexit.register(leave)
    failure.on_failure.append(end)


def refused_since(folder: str, start: int) -> list[dict[str, Any]]:
    """Return the failures of this host's processes that began at ``start`` (clock ticks since
    boot) or later, but for those that only followed the end of their group."""
    import json

    found, here = [], os.uname().nodename
    try:
        names = os.listdir(f"{folder}/failures")
    except OSError:
        return []
    for name in names:
        since = name.removesuffix(".json").partition("-")[2]
        if not since.isdecimal() or int(since) < start:
            continue
        try:
            with open(f"{folder}/failures/{name}", "rb") as file:
                record: dict[str, Any] = json.load(file)
        except (OSError, ValueError):
            record = {}  # it was refused all the same
        if record.get("host", here) == here and not record.get("lost"):
            found.append(record)
    return found


def tell_head(folder: str, failures: list[dict[str, Any]]) -> None:
    """Leave word with the head of several nodes of what it cannot know: it would wait for us."""
    node = (run_record(folder) or {}).get("node")
    untold = [item["line"] for item in failures if not item.get("told", True)]
    if not untold or not node or not node["rank"]:
        return
    word = {"host": node["head"], "port": node["port"], "node": node["rank"]}
    _send({**word, "line": untold[0]})


def tell_by_environment(line: str) -> None:
    """Leave word with the head where there is no plan beside which a node's place would be.

    Not from a process of Ray's, whose head has no store there: an actor would only die later.
    """
    rank = os.environ.get("NODE_RANK", "")
    rays = "RAY_RAYLET_PID" in os.environ
    if rank.isdecimal() and int(rank) and os.environ.get("HEAD_ADDR") and not rays:
        _send({"node": int(rank), "line": line})


def _send(word: dict[str, Any]) -> None:
    import json
    import subprocess

    data = json.dumps({"facts": {}, "patience": PATIENCE, **word}).encode()
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_OVERLAY_PLAN"}
    command = [sys.executable, "-m", "vllm_overlay.tell"]
    subprocess.run(command, input=data, env=environ, check=False)


def end_children() -> None:
    """End every process below this one: vLLM's EngineCore does not watch its parent."""
    # The resource tracker goes by itself, once it has removed what the others leave.
    family = [item for item in descendants(os.getpid()) if not _tracks(item[0])]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, start in family:
            try:
                if process_key(pid)[1] == start:
                    os.kill(pid, number)
            except (OSError, ValueError, IndexError):
                continue  # gone by now
        deadline = time.monotonic() + GRACE
        while family and time.monotonic() < deadline:
            family = [item for item in family if _alive(*item)]
            time.sleep(0.05)


def descendants(root: int) -> list[tuple[int, int]]:
    """Return (pid, start) of every process below ``root``."""
    parents: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            parents[int(name)] = (int(fields[1]), int(fields[19]))
    found: list[tuple[int, int]] = []
    below = {root}
    while below:
        below = {pid for pid, (parent, _) in parents.items() if parent in below}
        found += [(pid, parents[pid][1]) for pid in below]
    return found


def _tracks(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return False


def _alive(pid: int, start: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return int(fields[19]) == start and fields[0] != b"Z"
