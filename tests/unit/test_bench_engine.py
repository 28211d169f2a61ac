"""How bench.glm5next_engine shares out its engines and asks them; the engines need a GPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from bench import glm5next_engine as bench

WORKER = """
import json, sys
print(json.dumps({"kv_tokens": 7}), flush=True)
for line in sys.stdin:
    streams, seed = map(int, line.split())
    if seed == 13:
        sys.exit("out of memory")
    print(json.dumps({"rate": 10 * streams + seed, "running": streams}), flush=True)
"""


def running() -> bench.Running:
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115, the process writes to it
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", WORKER]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1)
    return bench.Running(bench.Setting(64, 10.0, "fast"), process, log)


def test_the_sides_of_a_size_are_timed_in_one_wave() -> None:
    waves = bench.waves()
    for wave in waves:
        sizes = [(each.heads, each.kv_gib) for each in wave]
        assert [each.side for each in wave] == list(bench.SIDES) * len(set(sizes))
        assert sum(each.memory for each in wave) <= bench.ROOM
    found = [(each.heads, each.kv_gib) for wave in waves for each in wave]
    assert found == [size for size in bench.SIZES for _ in bench.SIDES]


def test_a_round_that_warms_up_does_not_count() -> None:
    engine = running()
    assert engine.answer() == {"kv_tokens": 7}
    for seed, keep in ((9, False), (1, True), (5, True), (2, True)):
        engine.time(8, seed, keep=keep)
    engine.process.kill()
    (row,) = engine.rows()
    assert (row["heads"], row["kv_gib"], row["fix"], row["streams"]) == (64, 10.0, "fast", 8)
    assert (row["rates"], row["tokens_per_s"], row["best"]) == ([81, 85, 82], 82, 85)
    assert row["running_at_once"] == 8


def test_an_engine_that_ends_is_an_error_with_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    engine = running()
    engine.answer()
    for _ in range(2):  # also when it has been gone for a while
        with pytest.raises(subprocess.CalledProcessError):
            engine.time(8, 13)
        assert "out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "cores"), [([], ""), (["--cores", "0"], "0")])
def test_cores_are_given_to_the_engines(
    monkeypatch: pytest.MonkeyPatch, asked: list[str], cores: str
) -> None:
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda process: {0, 1})
    found: list[tuple[list[bench.Setting], str]] = []
    monkeypatch.setattr(bench, "compare", lambda wave, given: found.append((wave, given)) or [])
    assert bench.main(["--waves", "1", *asked]) == 0
    assert found == [(bench.waves()[1], cores)]


def test_a_core_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for cores in ("0,x", "99999", ""):
        with pytest.raises(SystemExit) as stopped:
            bench.main(["--cores", cores])
        assert stopped.value.code == 2 and "expected some of" in capsys.readouterr().err
