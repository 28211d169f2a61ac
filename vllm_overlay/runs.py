"""The servers of this node: the run record that ``serve`` writes right before it becomes vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.errors import ConfigError, UsageError
from vllm_overlay.processes import PROC, alive
from vllm_overlay.receipts import NAME


@dataclass(frozen=True)
class Run:
    """One live server and the plan that it runs. ``folder`` is plans/<digest>."""

    folder: Path
    pid: int
    start: int  # clock ticks since boot
    bind_host: str
    port: int
    served_model: str
    recipe: str
    started: str
    plan: Mapping[str, Any]
    node: Mapping[str, Any] | None = None  # rank, count, head, … of a node among several

    @property
    def digest(self) -> str:
        return self.folder.name

    @property
    def fixes(self) -> tuple[str, ...]:
        """The fixes that every process must apply."""
        return tuple(f["name"] for f in self.plan.get("fixes", []) if f["verdict"] == "apply")

    @property
    def expectations(self) -> list[dict[str, str]]:
        """The known answers of the recipe: ``{"prompt", "contains"}`` each."""
        return list(self.plan.get("smoke", {}).get("expect", []))

    @property
    def headless(self) -> bool:
        """Whether this node serves no HTTP: the second and later nodes of a server."""
        return bool(self.node and self.node["rank"])

    @property
    def url(self) -> str:
        """The address of the server as seen from this node."""
        return server_url(self.bind_host, self.port, self.plan.get("serve", {}))


def server_url(bind_host: str, port: int, serve: Mapping[str, Any]) -> str:
    """Return the address, as seen from its node, of a server with these serve flags."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind_host, bind_host)
    scheme = "https" if serve.get("ssl-certfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def live_runs(home: Path, proc: Path = PROC) -> list[Run]:
    """Return the live servers of this node, by port.

    Raises ConfigError if the record or the plan of a live server cannot be read.
    """
    found = []
    for path in (home / "plans").glob("*/runs/*.json"):
        match = NAME.fullmatch(path.name)
        if match and alive(int(match[1]), int(match[2]), proc) and (run := _read(path)):
            found.append(run)
    return sorted(found, key=lambda run: run.port)


def find_run(home: Path, port: int | None = None, proc: Path = PROC) -> Run | None:
    """Return the live server of this node (the one on ``port``, if given), or None.

    Raises UsageError if there are several to choose from, ConfigError as ``live_runs``.
    """
    found = [run for run in live_runs(home, proc) if port in (None, run.port)]
    runs = [run for run in found if not run.headless] or found  # several nodes on one machine
    if len(runs) > 1:
        ports = ", ".join(str(run.port) for run in runs)
        raise UsageError(
            "several servers run on this node", found=f"ports {ports}", remedy="give --port"
        )
    return runs[0] if runs else None


def _read(path: Path) -> Run | None:
    folder = path.parent.parent
    try:
        record = json.loads(path.read_bytes())
        plan = json.loads((folder / "plan.json").read_bytes())
        if record["host"] != os.uname().nodename:
            return None  # a shared folder: the same pid on another node
        return Run(
            folder=folder,
            pid=int(record["pid"]),
            start=int(record["start"]),
            bind_host=str(record.get("bind_host") or ""),
            port=int(record["port"]),
            served_model=str(record["served_model"]),
            recipe=str(record["recipe"]),
            started=str(record["started"]),
            plan=plan,
            node=record.get("node"),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            "the record of a running server cannot be read",
            file=path,
            found=f"{type(error).__name__}: {error}",
            remedy="restart the server",
        ) from error
