"""A short measurement of a fix with real servers and vLLM's own client."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.serving import cli, free_port, share_facts


def test_a_fix_is_measured_on_and_off(tmp_path: Path) -> None:
    share_facts(tmp_path / "home")
    short = ["--streams", "2", "--input-len", "16", "--output-len", "32", "--rounds", "1"]
    done = cli(
        "bench", "demo", "--toggle", "overlay-route", *short, "--prompts-per-stream", "2",
        "--save", str(tmp_path / "saved"), "--json", "--", "--port", str(free_port()),
        home=tmp_path / "home",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["sides"]["on"]["plan"] != result["sides"]["off"]["plan"]
    on, off = result["servers"]
    assert [(p["role"], p["overlay-route"]) for p in on["processes"]] == [
        ("api-server", "applied"),
        ("engine-core", "waiting"),
        ("worker", "waiting"),
    ]
    assert {process["overlay-route"] for process in off["processes"]} == {"absent"}
    assert on["kv_capacity_tokens"] == off["kv_capacity_tokens"] > 2048
    assert [row["side"] for row in result["rows"]] == ["on", "off"]
    for row in result["rows"]:
        assert (row["prompts"], row["running_most"]) == (4, 2)
        assert row["total_tokens_per_s"] > row["output_tokens_per_s"] > 0
    assert json.loads(Path(result["file"]).read_text())["rows"] == result["rows"]
