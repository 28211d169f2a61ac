"""Writes what one process applied: `receipts/<pid>-<start>.json` beside the plan."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

from vllm_overlay.activate.planfile import sha256

ENVIRONMENT_PREFIXES = ("VLLM_", "NCCL_", "GLOO_", "UCX_")
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def process_key(pid: int | None = None) -> tuple[int, int]:
    """Return (pid, start time in clock ticks since boot): unique although pids are reused."""
    pid = os.getpid() if pid is None else pid
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name in parentheses may hold spaces: field 22 is counted from the last one.
        return pid, int(file.read().rpartition(b")")[2].split()[19])


def process_title(pid: int | None = None) -> str:
    """Return the command line of a process as it shows now (`setproctitle` changes it)."""
    with open(f"/proc/{pid or 'self'}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode(errors="replace").strip()


def role_of(title: str) -> str:
    """Return api-server, headless, engine-core, worker, coordinator or other, from a title.

    vLLM titles its processes `<prefix>::<name>`; the first API server keeps `vllm serve …`.
    """
    words = title.split()
    if words and "::" in words[0]:
        name = words[0].split("::", 1)[1]
        for start, role in (
            ("EngineCore", "engine-core"),
            ("Worker", "worker"),
            ("RayWorker", "worker"),
            ("APIServer", "api-server"),
            ("DPCoordinator", "coordinator"),
        ):
            if name.startswith(start):
                return role
    elif "serve" in words and any(
        word.endswith("/vllm") or word == "vllm" or word.startswith("vllm.entrypoints.")
        for word in words[: words.index("serve")]
    ):
        return "headless" if "--headless" in words else "api-server"
    return "other"


def rank_of(title: str, environ: Mapping[str, str]) -> str | None:
    """Return the rank that launchers put into the environment, or that vLLM's title names."""
    if "RANK" in environ:
        return environ["RANK"]
    name = title.split("::", 1)[1] if "::" in title else ""
    return name.split("_", 1)[1] if name.startswith("Worker_") else None


def environment_digest(environ: Mapping[str, str]) -> str:
    """Return a digest of the variables that change what vLLM does; secrets stay out of it."""
    lines = sorted(
        f"{name}={value}"
        for name, value in environ.items()
        if name.startswith(ENVIRONMENT_PREFIXES) and not any(word in name for word in SECRET_WORDS)
    )
    return sha256("\n".join(lines).encode(errors="surrogateescape"))


def write_atomic(path: str, record: Mapping[str, Any]) -> None:
    """Write JSON to ``path`` so that a reader sees the old file or the new one, never a part."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise


def fix_states(
    plan: Mapping[str, Any],
    applied: Collection[tuple[str, str]],
    notes: Mapping[str, Mapping[str, str]],
) -> list[dict[str, Any]]:
    """Return each fix of the plan with the state of its modules in this process, and its notes."""
    fixes: list[dict[str, Any]] = []
    for fix in plan["fixes"]:
        if fix["verdict"] != "apply":
            continue
        names = sorted({target["module"] for target in fix["targets"]})
        modules = {
            name: "applied" if (fix["name"], name) in applied else "waiting" for name in names
        }
        # A module that waits was not imported here: one that cannot be applied ends the process.
        state = "applied" if "applied" in modules.values() else "waiting"
        fixes.append({"name": fix["name"], "state": state, "modules": modules})
        if fix["name"] in notes:
            fixes[-1]["notes"] = notes[fix["name"]]
    return fixes


def write_receipt(
    folder: str,
    plan: Mapping[str, Any],
    applied: Collection[tuple[str, str]],
    notes: Mapping[str, Mapping[str, str]],
    group: Mapping[str, Any] | None = None,
) -> None:
    """Write the receipt of this process into ``folder``/receipts (``folder`` is the plan's).

    Raises OSError where the folder cannot be written.
    """
    pid, start = process_key()
    title = process_title()
    record = {
        "schema": 1,
        "host": os.uname().nodename,
        "pid": pid,
        "start": start,
        "ppid": os.getppid(),
        "title": title,
        "role": role_of(title),
        "rank": rank_of(title, os.environ),
        "python": sys.version.split()[0],
        "vllm": {"version": plan["vllm"]["version"], "path": plan["vllm"]["path"]},
        "plan": plan["digest"],
        "environment": environment_digest(os.environ),
        "fixes": fix_states(plan, applied, notes),
        "group": group,
        "updated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_atomic(f"{folder}/receipts/{pid}-{start}.json", record)
