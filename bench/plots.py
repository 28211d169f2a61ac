"""Plots of the results: the time of a KDA step by requests, the engine's throughput by streams.

``python -m bench.plots`` (or ``make plots``) reads the files of ``kda-step`` and of
``glm5next-recoverssm-engine`` in ``bench/results``, of the newest day each, and writes to its
folder ``plots``. Needs matplotlib, which is in the extra ``bench``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_overlay.bench.record import RESULTS
from vllm_overlay.errors import EXIT_USAGE, ConfigError

STEP, ENGINE = "kda-step", "glm5next-recoverssm-engine"
FORMS = ("stock", "exact", "fast", "k3")
FLOOR = "memory floor"
SIDES = {"off": "off", "on": "exact", "fast": "fast"}  # as measured, as drawn
COLOURS = {
    "stock": "#444444",
    "off": "#444444",
    "exact": "#1f77b4",
    "fast": "#d62728",
    "k3": "#2ca02c",
    FLOOR: "#999999",
}

Json = dict[str, Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One pair of axes: its title, and the points (x, y) of each line, by rising x.

    ``lows`` and ``highs``: the same of the least and the greatest value that a line's points are
    the medians of, if they are.
    """

    title: str
    lines: dict[str, Points]
    lows: dict[str, Points] = field(default_factory=dict)
    highs: dict[str, Points] = field(default_factory=dict)


@dataclass(frozen=True)
class Plot:
    """A figure of panels, ``columns`` in a row; ``both_log``: y is logarithmic as x is."""

    name: str
    across: str
    up: str
    panels: list[Panel]
    columns: int
    both_log: bool


def newest(name: str, folder: Path) -> list[Json]:
    """Return the rows of a result, those of its newest day by rising time.

    A bench may have measured in several runs. Raises ConfigError if there is none.
    """
    found = [json.loads(file.read_text()) for file in folder.glob(f"{name}-20*.json")]
    if not found:
        raise ConfigError(
            "there is nothing to plot", file=folder, found=f"no {name}-*.json",
            expected="a result of its bench", remedy="run the bench with --save, or name --results",
        )  # fmt: skip
    found.sort(key=lambda result: str(result["date"]))
    day = found[-1]["date"][:10]
    return [row for result in found if result["date"].startswith(day) for row in result["rows"]]


def step_plot(rows: Iterable[Json], accepted: int) -> Plot:
    """Time against requests at ``accepted`` tokens a step: a panel for each heads and state."""
    chosen = [row for row in rows if row["accepted"] == accepted]
    if not chosen:
        raise ConfigError(
            "there is nothing to plot", found=f"no row with {accepted} accepted tokens",
            expected="a count that was measured", remedy="name another with --accepted",
        )  # fmt: skip
    panels = []
    states = sorted({row["state"] for row in chosen}, reverse=True)
    heads = sorted({row["heads"] for row in chosen}, reverse=True)
    for state in states:
        for count in heads:
            here = [row for row in chosen if (row["heads"], row["state"]) == (count, state)]
            lines = {
                form: points(here, "requests", "step_ms", form=form)
                for form in FORMS
                if any(row["form"] == form for row in here)
            }
            lines[FLOOR] = points(here, "requests", "floor_ms")
            panels.append(Panel(f"{count} heads, {state} states", lines))
    up = f"ms a step, {accepted} accepted"
    return Plot(STEP, "requests", up, panels, len(heads), both_log=True)


def engine_plot(rows: Sequence[Json]) -> Plot:
    """Throughput against streams: a panel for each number of heads and size of the KV cache."""
    panels = []
    for heads, memory in sorted({(row["heads"], row["kv_gib"]) for row in rows}):
        here = [
            row | {"low": min(row["rates"]), "high": max(row["rates"])}
            for row in rows
            if (row["heads"], row["kv_gib"]) == (heads, memory)
        ]
        sides = [side for side in SIDES if any(row["fix"] == side for row in here)]
        lines, lows, highs = (
            {SIDES[side]: points(here, "streams", what, fix=side) for side in sides}
            for what in ("tokens_per_s", "low", "high")
        )
        panels.append(Panel(f"{heads} heads, {memory:g} GiB of KV cache", lines, lows, highs))
    return Plot(ENGINE, "streams", "tokens a second", panels, 2, both_log=False)


def points(rows: Iterable[Json], across: str, up: str, **only: str) -> Points:
    """Return the points of the rows that have the given values; one a place, the last."""
    found = {
        row[across]: row[up]
        for row in rows
        if all(row[name] == value for name, value in only.items())
    }
    return sorted(found.items())


def draw(plot: Plot, folder: Path, kind: str) -> Path:
    """Write the plot to ``folder`` as ``kind``, svg or png; the same plot gives the same file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = -(-len(plot.panels) // plot.columns)
    with rc_context({"svg.hashsalt": plot.name, "font.size": 9}):
        figure = Figure(figsize=(4 * plot.columns, 3.2 * rows), layout="constrained")
        grid = figure.subplots(rows, plot.columns, squeeze=False).flatten()
        for axes in grid[len(plot.panels) :]:
            axes.remove()
        for axes, panel in zip(grid, plot.panels, strict=False):
            _draw_panel(axes, panel, plot)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{plot.name}.{kind}"
        figure.savefig(file, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return file


def _draw_panel(axes: Any, panel: Panel, plot: Plot) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(plot.across)
    axes.set_ylabel(plot.up)
    axes.set_xscale("log", base=2)
    if plot.both_log:
        axes.set_yscale("log")
    ticks = sorted({x for line in panel.lines.values() for x, _ in line})
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    for name, line in panel.lines.items():
        look = {"linestyle": "--"} if name == FLOOR else {"marker": "o", "markersize": 3}
        axes.plot(*zip(*line, strict=True), label=name, color=COLOURS[name], **look)
        if name in panel.lows:
            across, low = zip(*panel.lows[name], strict=True)
            high = [y for _, y in panel.highs[name]]
            axes.fill_between(across, low, high, color=COLOURS[name], alpha=0.12, linewidth=0)
    if not plot.both_log:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of results")
    parser.add_argument("--folder", type=Path, help="where the plots go; its folder plots")
    parser.add_argument("--accepted", type=int, default=3, help="tokens that a step accepts")
    parser.add_argument("--kind", choices=("svg", "png"), default="svg")
    options = parser.parse_args(arguments)
    try:
        plots = [
            step_plot(newest(STEP, options.results), options.accepted),
            engine_plot(newest(ENGINE, options.results)),
        ]
        for plot in plots:
            print(draw(plot, options.folder or options.results / "plots", options.kind))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except ImportError as error:
        print(f"plots: {error}: pip install -e '.[bench]'", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
