"""Which fix is in which process of this node, from the receipts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_overlay.health import receipts_of
from vllm_overlay.processes import PROC, Proc, vllm_processes
from vllm_overlay.receipts import Receipt, read_failures
from vllm_overlay.runs import Run, live_runs

if TYPE_CHECKING:
    from rich.console import RenderableType

FINE = ("running", "starting")
COLOURS = {"applied": "green", "waiting": "yellow", "running": "green", "starting": "yellow"}


def status_rows(home: Path, proc: Path = PROC) -> dict[str, Any]:
    """Return what ``status --json`` prints: servers, their failures, and every vLLM process.

    A process's ``fixes`` are its own plan's, and ``notes`` what each chose there, by fix and key;
    both are empty without a receipt. ``state`` is running, starting, without plan, without
    receipt, or what is wrong with its receipt.
    """
    runs = live_runs(home, proc)
    processes = vllm_processes(proc)
    receipts = receipts_of(processes, home / "plans")
    return {
        "servers": [_server(run) for run in runs],
        "processes": [_process(p, receipts.get((p.pid, p.start))) for p in processes],
    }


def status_table(rows: Mapping[str, Any]) -> RenderableType:
    """Return the rows as tables for a terminal."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for server in rows["servers"]:
        parts.append(
            Text(f"{server['recipe']} at {server['url']}, plan {server['plan'][:8]}", style="bold")
        )
        parts += [
            Text(f"pid {f['pid']} failed: {f['line']}", style="red") for f in server["failures"]
        ]
    if not rows["servers"]:
        parts.append(Text("no server that vllm-overlay started is running on this node"))
    if not rows["processes"]:
        return Group(*parts)
    processes = rows["processes"]
    # Fixes are listed by state: as columns of their own they would soon be wider than a terminal.
    states = [state for row in processes for state in row["fixes"].values()]
    columns = sorted(set(states), key=lambda state: (state not in COLOURS, state))
    table = Table("pid", Column("role", no_wrap=True), "plan", "state", box=SIMPLE, pad_edge=False)
    for state in columns:
        table.add_column(state, style=COLOURS.get(state, "red"), no_wrap=True)
    with_notes = any(row["notes"] for row in processes)
    if with_notes:
        table.add_column("notes")
    for row in processes:
        named = [[name for name, state in row["fixes"].items() if state == c] for c in columns]
        table.add_row(
            str(row["pid"]),
            f"{row['role']} {row['rank'] or ''}".strip(),
            row["plan"][:8] if row["plan"] else "-",
            Text(row["state"], style=COLOURS.get(row["state"], "red")),
            *("\n".join(names) or "-" for names in named),
            *([noted(row)] if with_notes else []),
        )
    return Group(*parts, table)


def noted(row: Mapping[str, Any]) -> RenderableType:
    """Return the cell of a process's notes."""
    from rich.text import Text

    notes = row["notes"].items()
    lines = [f"{fix} {key}: {value}" for fix, said in notes for key, value in said.items()]
    return Text("\n".join(lines) or "-", overflow="fold")


def _server(run: Run) -> dict[str, Any]:
    failures = [f for f in read_failures(run.folder) if f.start >= run.start or not f.start]
    return {
        "recipe": run.recipe,
        "plan": run.digest,
        "pid": run.pid,
        "port": run.port,
        "url": run.url,
        "model": run.served_model,
        "started": run.started,
        "fixes": list(run.fixes),
        "failures": [{"pid": f.pid, "line": f.line} for f in failures],
    }


def _process(process: Proc, receipt: Receipt | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "pid": process.pid,
        "ppid": process.ppid,
        "role": process.role,
        "rank": None,
        "title": process.title,
        "plan": process.plan.parent.name if process.plan else None,
        "state": "without receipt" if process.state == "running" else process.state,
        "why": process.why,
        "environment": None,
        "fixes": {},
        "notes": {},
    }
    if receipt is not None and process.state == "without plan":
        row["plan"] = receipt.plan  # the receipt is of what this process was before an exec
    elif receipt is not None:
        row |= {
            "role": receipt.role,
            "rank": receipt.rank,
            "plan": receipt.plan,
            "state": receipt.problem or receipt.waiting or "running",
            "environment": receipt.environment,
            "fixes": {name: receipt.state(name) for name in receipt.fixes},
            "notes": dict(receipt.notes),
        }
    return row
