"""The processes of every node of a group: what each node says of its own, gathered by the head."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_overlay.activate.family import descendants
from vllm_overlay.activate.receipt import process_key
from vllm_overlay.errors import UsageError
from vllm_overlay.receipts import read
from vllm_overlay.runs import Run
from vllm_overlay.status import COLOURS, FINE, noted, status_rows

if TYPE_CHECKING:
    from rich.console import RenderableType

FRESH = 20.0  # seconds; what a head has not rewritten for longer is no news
SHOWN = ("pid", "role", "rank", "plan", "state", "fixes", "notes")


def node_rows(plan: Path) -> list[dict[str, Any]]:
    """Return the rows of this machine's processes of a plan, this process's own included, by pid.

    ``plan`` is the plan's folder. A process without a plan counts for every one.
    """
    rows = [
        {key: row[key] for key in SHOWN}
        for row in status_rows(plan.parent.parent)["processes"]
        if row["plan"] in (plan.name, None)
    ]
    for receipt in read(plan):
        if (receipt.pid, receipt.start) == process_key():  # status leaves out who asks
            fixes = {name: receipt.state(name) for name in receipt.fixes}
            own = (receipt.pid, receipt.role, receipt.rank, receipt.plan)
            state = receipt.problem or "running"
            rows.append(dict(zip(SHOWN, (*own, state, fixes, dict(receipt.notes)), strict=True)))
    return sorted(rows, key=lambda row: int(row["pid"]))


def own_rows(plan: Path, run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a node's main process and of all below it, with the node.

    ``run`` is the main process's run record. Another node may share the machine.
    """
    node = run["node"]
    where = {"node": node["rank"], "host": os.uname().nodename, "address": node["address"]}
    family = {run["pid"], *(pid for pid, _ in descendants(run["pid"]))}
    return [{**where, **row} for row in node_rows(plan) if row["pid"] in family]


def every_row(plan: Path, run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of every node of a head's group; ``run`` is the head's run record.

    A node that has said nothing yet, or not for a while, has one row that says so.
    """
    node = run["node"]
    if not node["nnodes"]:
        return ray_rows(plan)
    rows = own_rows(plan, run)
    told, age = _told(plan / "cluster" / f"{run['pid']}-{run['start']}.json")
    for other in range(1, node["count"]):
        theirs = told.get(str(other))
        if not theirs or age > FRESH:
            state = f"no news for {age:.0f} s" if theirs else "missing"
            absent = dict.fromkeys(("host", "address", *SHOWN))
            told_of = {"node": other, "role": "node", "state": state, "fixes": {}, "notes": {}}
            theirs = [{**absent, **told_of}]
        rows += theirs
    return rows


def ray_rows(plan: Path) -> list[dict[str, Any]]:
    """Return this machine's rows, and Ray's actors elsewhere as they were when they joined.

    Ray itself watches its actors; where one ends, the server does.
    """
    host = os.uname().nodename
    where = {"node": 0, "host": host, "address": ""}
    rows = [{**where, **row} for row in node_rows(plan)]
    here = {row["pid"] for row in rows}
    roster = [item for receipt in read(plan) if receipt.pid in here for item in receipt.roster]
    for item in roster:
        name = item["host"].partition(" ")[0]
        if name != host or item["pid"] not in here:
            facts = {"role": "worker", "rank": str(item["rank"]), "plan": plan.name}
            kept = {key: item[key] for key in ("node", "address", "pid", "fixes")}
            rows.append({**kept, **facts, "host": name, "state": "running", "notes": {}})
    return rows


def cluster_rows(run: Run | None) -> dict[str, Any]:
    """Return what ``status --cluster --json`` prints: every process of every node of a server.

    Raises UsageError where this machine is not the head of several nodes.
    """
    if run is None or run.node is None:
        raise UsageError(
            "no server of several nodes runs on this machine",
            remedy="`vllm-overlay status` shows this machine's processes",
        )
    if run.node["rank"]:
        raise UsageError(
            "only the head knows of every node",
            found=f"node {run.node['rank']}",
            remedy=f"ask on {run.node['head']}",
        )
    rows = every_row(run.folder, {"pid": run.pid, "start": run.start, "node": run.node})
    return {"plan": run.digest, "recipe": run.recipe, "nodes": run.node["count"], "rows": rows}


def _told(path: Path) -> tuple[Mapping[str, Any], float]:
    """Return the rows that the head has gathered, by node, and their age in seconds."""
    try:
        record = json.loads(path.read_bytes())
        return dict(record["nodes"]), max(0.0, time.time() - float(record["at"]))
    except (OSError, ValueError, TypeError, KeyError):
        return {}, 0.0


def reasons(run: Run) -> list[str]:
    """Return why the other nodes of a head's group do not serve as they must."""
    found = []
    for row in cluster_rows(run)["rows"]:
        where = f"node {row['node']}" + (f" on {row['host']}" if row["host"] else "")
        if row["node"] == 0:
            continue  # the check of this node's own processes
        if row["pid"] is None:
            found.append(f"{where}: {row['state']}")
        elif row["state"] not in FINE:
            found.append(f"{where}, process {row['pid']} ({row['role']}): {row['state']}")
        elif row["plan"] is not None and row["plan"] != run.digest:
            found.append(f"{where}, process {row['pid']}: it runs plan {row['plan'][:8]}")
        else:
            wrong = [
                f"{fix} is {row['fixes'].get(fix, 'absent')}"
                for fix in run.fixes
                if row["state"] == "running" and row["fixes"].get(fix) not in ("applied", "waiting")
            ]
            found += [f"{where}, process {row['pid']} ({row['role']}): {item}" for item in wrong]
    return found


def cluster_table(found: Mapping[str, Any]) -> RenderableType:
    """Return the rows as a table for a terminal."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    head = Text(
        f"{found['recipe']} on {found['nodes']} nodes, plan {found['plan'][:8]}", style="bold"
    )
    table = Table("node", "host", Column("role", no_wrap=True), "pid", "plan", "state", "fixes",
                  box=SIMPLE, pad_edge=False)  # fmt: skip
    with_notes = any(row["notes"] for row in found["rows"])
    if with_notes:
        table.add_column("notes")
    for row in found["rows"]:
        table.add_row(
            str(row["node"]),
            f"{row['host']} {row['address']}" if row["host"] else "-",
            f"{row['role']} {row['rank'] or ''}".strip(),
            str(row["pid"] or "-"),
            row["plan"][:8] if row["plan"] else "-",
            Text(row["state"], style=COLOURS.get(row["state"], "red")),
            "\n".join(f"{name} {state}" for name, state in row["fixes"].items()) or "-",
            *([noted(row)] if with_notes else []),
        )
    return Group(head, table)
