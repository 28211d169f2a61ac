"""What bench.plots draws: the right points in the right panels. The drawing itself needs
matplotlib, which no lock has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import plots

FORMS = {"stock": 8.0, "exact": 4.0, "fast": 2.0, "k3": 6.0}


def step_rows() -> list[plots.Json]:
    """Rows as bench.kda_step saves them, most requests first."""
    return [
        {
            "heads": heads,
            "requests": requests,
            "state": state,
            "form": form,
            "accepted": accepted,
            "step_ms": times * requests + accepted,
            "floor_ms": 0.5 * requests,
        }
        for heads in (16, 64)
        for state in ("bf16", "fp32")
        for requests in (128, 8)
        for accepted in (1, 3)
        for form, times in FORMS.items()
    ]


def engine_rows(sides: tuple[str, ...]) -> list[plots.Json]:
    return [
        {
            "heads": 16,
            "kv_gib": memory,
            "fix": side,
            "streams": streams,
            "tokens_per_s": 9 * place,
            "rates": [9 * place, 9 * place + 1, 9 * place - 2],
        }
        for memory in (12.0, 3.0)
        for place, side in enumerate(sides)
        for streams in (32, 8)
    ]


def save(folder: Path, name: str, rows: list[plots.Json], date: str) -> None:
    body = json.dumps({"date": f"{date}T00:00:00+00:00", "rows": rows})
    (folder / f"{name}-{date}.json").write_text(body)


def test_a_step_has_a_panel_for_heads_and_state() -> None:
    plot = plots.step_plot(step_rows(), accepted=3)
    titles = [panel.title for panel in plot.panels]
    assert titles == [
        "64 heads, fp32 states",
        "16 heads, fp32 states",
        "64 heads, bf16 states",
        "16 heads, bf16 states",
    ]
    assert (plot.columns, plot.both_log) == (2, True)
    lines = plot.panels[0].lines
    assert list(lines) == [*FORMS, plots.FLOOR]
    assert lines["fast"] == [(8, 19.0), (128, 259.0)]
    assert lines[plots.FLOOR] == [(8, 4.0), (128, 64.0)]


def test_a_form_that_was_not_measured_has_no_line() -> None:
    rows = [row for row in step_rows() if row["form"] != "k3"]
    assert list(plots.step_plot(rows, 1).panels[0].lines) == ["stock", "exact", "fast", plots.FLOOR]


@pytest.mark.parametrize(
    ("sides", "lines"),
    [
        (("off", "on"), {"off": 0, "exact": 9}),
        (("off", "on", "fast"), {"off": 0, "exact": 9, "fast": 18}),
    ],
)
def test_the_engine_has_a_panel_for_heads_and_memory(
    sides: tuple[str, ...], lines: dict[str, int]
) -> None:
    plot = plots.engine_plot(engine_rows(sides))
    assert [panel.title for panel in plot.panels] == [
        "16 heads, 3 GiB of KV cache",
        "16 heads, 12 GiB of KV cache",
    ]
    for panel in plot.panels:
        for found, more in ((panel.lines, 0), (panel.lows, -2), (panel.highs, 1)):
            wanted = {side: [(x, rate + more) for x in (8, 32)] for side, rate in lines.items()}
            assert found == wanted
    assert not plot.both_log


def test_what_the_engine_bench_has_saved_can_be_drawn() -> None:
    panels = plots.engine_plot(plots.newest(plots.ENGINE, plots.RESULTS)).panels
    assert len(panels) == 4
    for panel in panels:
        assert list(panel.lines)[:2] == ["off", "exact"]
        assert all([x for x, _ in line] == [8, 32, 64, 128] for line in panel.lines.values())


def test_the_newest_day_counts_and_its_last_run_wins(tmp_path: Path) -> None:
    runs = {"01T09": "old", "02T11": "last", "02T08": "first"}
    for time, form in runs.items():
        body = json.dumps({"date": f"2026-12-{time}:00:00+00:00", "rows": [{"form": form}]})
        (tmp_path / f"{plots.STEP}-2026-12-{time}.json").write_text(body)
    (tmp_path / f"{plots.STEP}-notes.json").write_text("[]")
    rows = plots.newest(plots.STEP, tmp_path)
    assert [row["form"] for row in rows] == ["first", "last"]
    twice = [{"x": 8, "y": 1.0}, {"x": 4, "y": 2.0}, {"x": 8, "y": 3.0}]
    assert plots.points(twice, "x", "y") == [(4, 2.0), (8, 3.0)]


def test_without_a_result_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plots.main(["--results", str(tmp_path)]) == 78
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{tmp_path}: there is nothing to plot; found no kda-step-*.json" in said


def test_without_the_asked_count_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, plots.STEP, step_rows(), "2026-12-01")
    assert plots.main(["--results", str(tmp_path), "--accepted", "7"]) == 78
    assert "found no row with 7 accepted tokens" in capsys.readouterr().err


def test_without_matplotlib_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    save(tmp_path, plots.STEP, step_rows(), "2026-12-01")
    save(tmp_path, plots.ENGINE, engine_rows(("off", "on")), "2026-12-01")
    assert plots.main(["--results", str(tmp_path)]) == 2
    assert "pip install" in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()
