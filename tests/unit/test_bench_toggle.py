"""`bench`: what is measured, kept and refused, and that no server is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import overlay
from tests.support.desk import Desk
from tests.support.node import Node, wait_for
from tests.support.toggled import FIX, FLAG, left, start
from vllm_overlay.bench import record
from vllm_overlay.bench.sides import both_sides
from vllm_overlay.errors import ConfigError, UsageError


def bench(folder: Path, wrong: str, *arguments: str) -> tuple[int, str, str]:
    """Run the command to its end; nothing of it may live then."""
    out, err = (running := start(folder, wrong, *arguments)).communicate(timeout=120)
    assert left(folder) == []
    return running.returncode, out, err


# --- what is measured ---


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the JSON of a measurement of two rounds."""
    folder = tmp_path_factory.mktemp("good")
    saved = str(folder / "saved")
    status, out, err = bench(folder, "", "--json", "--rounds", "2", "--save", saved)
    assert (status, err) == (0, "")
    return folder, json.loads(out)


def test_sides_take_turns_and_get_the_same_loads(good: tuple[Path, dict[str, Any]]) -> None:
    folder, result = good
    servers = [(row["side"], row["round"]) for row in result["servers"]]
    assert servers == [("on", 1), ("off", 1), ("on", 2), ("off", 2)]
    loads = [(row["side"], row["round"], row["streams"]) for row in result["rows"]]
    assert loads == [(side, number, n) for side, number in servers for n in (1, 2)]
    clients = [json.loads(line) for line in (folder / "clients").read_text().splitlines()]
    seeds = [words[words.index("--seed") + 1] for words in clients]
    assert seeds[:2] == seeds[2:4] and seeds[4:6] == seeds[6:]
    assert len(set(seeds)) == 4
    assert clients[1][clients[1].index("--num-prompts") + 1] == "6"


def test_rows_have_what_client_and_metrics_show(good: tuple[Path, dict[str, Any]]) -> None:
    _, result = good
    rates = [row["output_tokens_per_s"] for row in result["rows"]]
    assert rates == [120, 240, 60, 120] * 2
    assert {row["running_most"] for row in result["rows"]} == {1}
    assert {row["kv_capacity_tokens"] for row in result["servers"]} == {4096}
    assert [(line["streams"], line["on_to_off"]) for line in result["medians"]] == [(1, 2), (2, 2)]


def test_the_receipts_of_each_server_are_kept(good: tuple[Path, dict[str, Any]]) -> None:
    _, result = good
    plans = {side: result["sides"][side]["plan"] for side in ("on", "off")}
    assert plans["on"] != plans["off"]
    assert {s: result["sides"][s]["flag"] for s in plans} == {"on": f"{FLAG}=1", "off": f"{FLAG}=0"}
    for server in result["servers"]:
        assert server["plan"] == plans[server["side"]]
        state = {"on": "applied", "off": "absent"}[server["side"]]
        assert [(p["role"], p[FIX]) for p in server["processes"]] == [
            ("api-server", state),
            ("engine-core", state),
        ]


def test_the_file_is_what_was_printed_with_date_hardware_and_command(
    good: tuple[Path, dict[str, Any]],
) -> None:
    folder, result = good
    kept = json.loads(Path(result["file"]).read_text())
    assert Path(result["file"]).parent == folder / "saved"
    assert {key: kept[key] for key in result if key != "file"} == {
        key: value for key, value in result.items() if key != "file"
    }
    assert kept["date"] and kept["hardware"]["cores"]
    assert kept["command"].startswith(f"vllm-overlay bench demo --toggle {FIX} ")
    assert (kept["vllm"], kept["recipe"]["name"]) == ("9.9.0", "demo")
    everything = "".join(f.read_text(errors="replace") for f in folder.rglob("*") if f.is_file())
    assert "s3cret" not in everything


def test_a_table_of_medians_is_shown(tmp_path: Path) -> None:
    status, out, err = bench(tmp_path, "", "--save", str(tmp_path / "saved"), "--", "--port", "1")
    assert (status, err) == (0, "")
    assert ["1", "120.0", "60.0", "2.000", "1", "1", "4096", "4096"] in map(
        str.split, out.splitlines()
    )
    assert out.splitlines()[-1].startswith(f"{tmp_path}/saved/demo-{FIX}-")
    assert (tmp_path / "argv").read_text() == "serve demo -- --port 1"


def test_a_second_result_of_a_day_does_not_replace_the_first(tmp_path: Path) -> None:
    files = [record.save("x", "make x", [{"n": n}], folder=tmp_path) for n in range(3)]
    assert len(set(files)) == 3
    assert [json.loads(file.read_text())["rows"] for file in files] == [
        [{"n": n}] for n in range(3)
    ]


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("wrong", "status", "said"),
    [
        ("refused", 78, "exit status 78; found vllm-overlay: the port is taken; all of it: "),
        ("dies", 1, "ended with exit status 1; found RuntimeError: no memory; all of it: "),
        ("dies off", 1, "bench-off.log"),
        ("nonsense", 1, "is not healthy; found asked 'What is the capital of France"),
        ("wrong on", 1, f"is not healthy; found process .*: {FIX} is absent"),
        ("wrong off", 1, f"do not show the fix off in every process; found {FIX} is applied in"),
        ("other plan", 1, "runs another plan than was resolved; found bbbbbbbb"),
        ("client dies", 1, "without a result; found ValueError: no such tokenizer"),
        ("requests fail", 1, "streams failed; found 2 of 3 requests completed"),
        ("no tokens", 1, "found 3 of 3 requests completed, 0 tokens per second"),
        ("server dies", 1, "do not show the fix on in every process; found .*no live api-server"),
    ],
)
def test_one_line_says_what_went_wrong(tmp_path: Path, wrong: str, status: int, said: str) -> None:
    saved = str(tmp_path / "saved")
    found, out, err = bench(tmp_path, wrong, "--json", "--streams", "1", "--save", saved)
    (line,) = err.splitlines()
    assert line.startswith("vllm-overlay: ")
    assert re.search(said, line)
    assert (found, json.loads(out)) == (status, {"errors": [line.removeprefix("vllm-overlay: ")]})
    assert list((tmp_path / "saved").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["slow", "client hangs"])
def test_a_signal_leaves_no_server(tmp_path: Path, stage: str, number: signal.Signals) -> None:
    running = start(tmp_path, stage, "--save", str(tmp_path / "saved"))
    waited_for = tmp_path / {"slow": "pids", "client hangs": "hangs"}[stage]
    wait_for(waited_for.exists, f"{waited_for}")
    assert left(tmp_path) != []
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, "Traceback" in err) == (130, False)
    assert left(tmp_path) == []


# --- what is refused before anything is started ---


def refused(desk: Desk, fix: str, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        both_sides(desk.request(**options), fix, 1)
    return caught.value


def values(desk: Desk, environ: Mapping[str, str], **body: Any) -> list[str]:
    sides = both_sides(desk.request(environ=dict(environ), **body), "a", 1)
    for side in sides:
        (fix,) = side.plan.fixes
        assert (side.environ["VLLM_A"], fix.value) == (side.value, side.value)
        assert fix.verdict == {"on": "apply", "off": "off"}[side.name]
    return [side.value for side in sides]


def test_the_flag_makes_the_sides(desk: Desk) -> None:
    desk.fix("a", flag={"name": "VLLM_A", "values": ["0", "1", "2"], "default": "2"})
    for environ, on in (({}, "2"), ({"VLLM_A": "1"}, "1"), ({"VLLM_A": "0"}, "2")):
        assert values(desk, environ, fixes=["a"]) == [on, "0"]
    assert values(desk, {}) == ["2", "0"]  # a recipe that does not name it


def test_fixes_that_cannot_be_toggled_are_refused(desk: Desk) -> None:
    desk.fix("plain")
    desk.fix("later", flag="VLLM_LATER", vllm=">=0.2.0")
    desk.fix("theirs", flag="VLLM_THEIRS", modules={"vllm.config": "new.py"})
    (desk.folder / "fixes/theirs/new.py").write_bytes(
        (desk.posed.root / "vllm/config.py").read_bytes()
    )
    error = refused(desk, "plan")
    assert isinstance(error, UsageError) and "did you mean 'plain'?" in str(error)
    assert "cannot be toggled; found no flag" in str(refused(desk, "plain"))
    assert "later is incompatible: vLLM 0.1.0 is outside" in str(refused(desk, "later"))
    assert "on and off are the same: the fix theirs is upstreamed" in str(refused(desk, "theirs"))


def test_several_nodes_and_long_requests_are_refused(desk: Desk) -> None:
    desk.fix("a", flag="VLLM_A")
    several = refused(desk, "a", serve={"tensor-parallel-size": 2}, nodes={"count": 2})
    assert "several nodes" in str(several)
    request = desk.request(serve={"max-model-len": 64})
    both_sides(request, "a", 64)
    with pytest.raises(UsageError, match="do not fit"):
        both_sides(request, "a", 65)


@pytest.mark.parametrize("streams", ["", "8,", "8,0", "8;9", "-1", "eight"])
def test_streams_that_are_no_numbers_are_refused(tmp_path: Path, streams: str) -> None:
    done = overlay(
        ["bench", "demo", "--toggle", FIX, "--streams", streams, "--save", "saved"], tmp_path
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("vllm-overlay: --streams is no list of numbers; found ")
    assert not (tmp_path / "saved").exists()


def test_a_folder_that_takes_no_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, _, err = bench(tmp_path, "", "--save", str(tmp_path / "file"))
    assert (status, (tmp_path / "pids").exists()) == (78, False)
    assert err.startswith(f"vllm-overlay: {tmp_path}/file: results cannot be kept there; found ")


def test_another_server_of_the_node_is_refused(tmp_path: Path) -> None:
    Node(tmp_path, port=4711).write_run(os.getpid())
    status, _, err = bench(tmp_path, "", "--save", str(tmp_path / "saved"))
    assert (status, (tmp_path / "pids").exists()) == (78, False)
    assert f"demo at http://127.0.0.1:4711, process {os.getpid()}; stop it" in err
