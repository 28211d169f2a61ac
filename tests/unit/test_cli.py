"""The command line: what a program is told of a refusal, and a pipe without a reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import command
from tests.support.desk import Desk
from vllm_overlay import cli

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Any:
    """Run a command in this process; return its status and its two streams."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vllm-overlay", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return call


def test_a_plan_that_is_refused_says_so_in_its_json(
    run: Any, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("recipes", "fixes", "models", "home"):
        monkeypatch.setenv(f"VLLM_OVERLAY_{name.upper()}", str(desk.folder / name))
    plan = desk.resolve(serve={"max-modellen": 3}).plan
    status, out, err = run("plan", "r", "--json")
    body = json.loads(out)
    assert status == 78
    assert [f"vllm-overlay: {line}" for line in body["errors"]] == err.splitlines() != []
    assert {**plan.body(), "errors": body["errors"]} == body, "the digest is the plan's own"
    desk.resolve()
    assert json.loads(run("plan", "r", "--json")[1])["errors"] == []


@pytest.mark.parametrize(
    ("words", "expected", "says"),
    [
        (["plan", "nope", "--json"], 78, "there is no recipe 'nope'"),
        (["check", "--vllm", "/nope", "--json"], 78, "no such vLLM"),
        (["plan", "--json"], 2, "RECIPE"),
        (["status", "--json", "--nope"], 2, "--nope"),
    ],
)
def test_a_refusal_without_a_result_is_json_too(
    run: Any, words: list[str], expected: int, says: str
) -> None:
    status, out, err = run(*words)
    assert status == expected and says in err
    (line,) = json.loads(out)["errors"]
    assert says in line


def test_a_refusal_is_no_json_where_none_was_asked_for(run: Any) -> None:
    assert run("plan", "nope", "--", "--json")[1] == ""


@pytest.mark.parametrize(
    "words", [["cache", "ls", "--json"], ["cache", "ls"], ["plan", "nope", "--json"]]
)
def test_a_pipe_without_a_reader_is_no_traceback(tmp_path: Path, words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command.argv(words),
        env=command.environment(tmp_path),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
