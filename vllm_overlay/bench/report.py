"""What a measurement comes to: medians over its rounds, a table, and the file that is kept."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from vllm_overlay.bench.record import save
from vllm_overlay.bench.sides import ON_OFF
from vllm_overlay.bench.toggle import Measured, command_line

RATE = "output_tokens_per_s"
HEADINGS = (
    "streams",
    "tok/s on",
    "tok/s off",
    "on/off",
    "running on",
    "running off",
    "KV on",
    "KV off",
)


def summary(measured: Measured) -> list[dict[str, Any]]:
    """Return the medians of both sides for each number of streams, and the ratio of their rates."""
    found = []
    for streams in dict.fromkeys(row["streams"] for row in measured.rows):
        line: dict[str, Any] = {"streams": streams}
        for side in ON_OFF:
            rows = [r for r in measured.rows if (r["side"], r["streams"]) == (side, streams)]
            servers = [server for server in measured.servers if server["side"] == side]
            line[side] = {
                RATE: _median([row[RATE] for row in rows]),
                "running_most": _median([row["running_most"] for row in rows]),
                "kv_capacity_tokens": _median([s["kv_capacity_tokens"] for s in servers]),
            }
        line["on_to_off"] = round(line["on"][RATE] / line["off"][RATE], 4)
        found.append(line)
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def keep(measured: Measured, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write the measurement into ``folder``; return the file and what `--json` prints."""
    on, _ = measured.sides
    plan = on.plan
    body = {
        "vllm": plan.vllm["version"],
        "torch": plan.vllm["torch"],
        "recipe": dict(plan.recipe),
        "model": plan.model,
        "fix": on.fix,
        "sides": {
            side.name: {"plan": side.plan.digest, "flag": f"{side.flag}={side.value}"}
            for side in measured.sides
        },
        "medians": summary(measured),
        "servers": measured.servers,
    }
    name = f"{plan.recipe['name']}-{on.fix}"
    file = save(name, command_line(), measured.rows, folder=folder, more=body)
    return file, {**body, "rows": measured.rows, "file": str(file)}


def table(medians: Sequence[dict[str, Any]], fix: str) -> Table:
    """Return the medians for a terminal."""
    shown = Table(title=f"{fix}: medians", title_justify="left", box=SIMPLE, pad_edge=False)
    for heading in HEADINGS:
        shown.add_column(heading, justify="right")
    for line in medians:
        on, off = line["on"], line["off"]
        cells = [line["streams"], on[RATE], off[RATE], f"{line['on_to_off']:.3f}"]
        for name in ("running_most", "kv_capacity_tokens"):
            cells += ["-" if side[name] is None else f"{side[name]:g}" for side in (on, off)]
        shown.add_row(*map(str, cells))
    return shown
