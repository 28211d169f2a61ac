"""The Triton forms of the fused KDA step at real head size, beside stock, in the interpreter."""

from __future__ import annotations

import json

import pytest

from tests.support.kernels import interpreted, release

NAMES = ["right-chunk", "apart-chunk", "right-sequential", "apart-sequential"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in each check: a traceback, or nothing."""
    home = tmp_path_factory.mktemp("kda-step")
    run = interpreted("-m", "tests.support.kda_step_checks", home=home, tree=release("0.33.0"))
    lines = [line for line in run.stdout.splitlines() if line.startswith("[")]
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(json.loads(line) for line in lines)


def test_every_check_has_run(results: dict[str, str]) -> None:
    assert list(results) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_check(results: dict[str, str], name: str) -> None:
    assert not results[name], results[name]
