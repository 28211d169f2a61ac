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
from vllm_overlay import cli, launch

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


@pytest.fixture
def folders(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """The desk's folders as those of this process."""
    for name in ("recipes", "fixes", "models", "home"):
        monkeypatch.setenv(f"VLLM_OVERLAY_{name.upper()}", str(desk.folder / name))
    return desk


def test_doctor_shows_every_check(run: Any, folders: Desk) -> None:
    folders.resolve(serve={"port": 1})
    status, out, _ = run("doctor", "r", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert all(set(c) == {"name", "state", "detail", "remedy"} for c in checks.values())
    assert checks["recipe"] == {"name": "recipe", "state": "ok", "detail": "r", "remedy": ""}
    named = {"driver", "requires", "shm", "model", "caches", "ports", "address", "interfaces"}
    assert {*named, "rdma", "core", "clock", "secrets"} <= set(checks)
    assert status == (1 if any(c["state"] == "fail" for c in checks.values()) else 0)
    status, out, _ = run("doctor", "--json")
    assert status == 0
    assert not {"recipe", "ports"} & {check["name"] for check in json.loads(out)["checks"]}


def test_doctor_goes_on_where_the_recipe_is_refused(
    run: Any, folders: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret key")
    folders.resolve(serve={"port": "many", "tensor-parallel-size": "x"})
    for recipe in ("r", "nope"):
        status, out, _ = run("doctor", recipe)
        assert status == 1
        assert "recipe" in out and "fail" in out and "clock" in out and "VLLM_API_KEY" in out
        assert "s3cret" not in out


@pytest.fixture
def serve(run: Any, folders: Desk, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Serve the recipe, but for becoming vLLM; return its status and its two streams."""
    monkeypatch.setattr(launch, "vllm_script", lambda: "vllm")
    monkeypatch.setattr(launch, "_prove_activation", lambda _: None)
    monkeypatch.setattr(launch, "become", lambda _: sys.exit(0))
    return lambda *words: run("serve", "r", *words)


def test_serve_looks_first_and_writes_nothing_when_a_check_fails(
    serve: Any, folders: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "192.0.2.7")
    envs = "environment_variables = {'VLLM_PORT': None, 'VLLM_HOST_IP': None}\n"
    (folders.posed.root / "vllm/envs.py").write_text(envs)
    folders.resolve()
    status, _, err = serve()
    assert status == 78
    assert "vllm-overlay: VLLM_HOST_IP is 192.0.2.7, and no interface of this machine has" in err
    assert not (folders.folder / "home/plans").exists()


def test_serve_warns_and_goes_on(
    serve: Any, folders: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    folders.resolve()
    status, _, err = serve()
    assert status == 141  # become was reached: what cli.main makes of its SystemExit
    (line,) = [line for line in err.splitlines() if "HF_TOKEN" in line]
    assert line == (
        "vllm-overlay: warning: secrets: HF_TOKEN is set, and empty: it counts as not set; "
        "unset HF_TOKEN, or give it a value"
    )


def test_the_checks_import_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, os; from pathlib import Path; from vllm_overlay import doctor\n"
        "doctor.examine(None, Path('/tmp'), os.environ)\n"
        "sys.exit(bool({'vllm', 'torch', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
