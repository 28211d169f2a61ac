"""GLM-5.3-Flash's KDA layer with its real metadata builder, with and without RecoverSSM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernels import FIXES, interpreted, release
from tests.support.plans import write_fixes_plan


def run(home: Path, plan: Path | None) -> dict[str, Any]:
    done = interpreted(
        "-m", "tests.support.glm_layer", home=home, plan=plan, tree=release("0.33.0")
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    home = tmp_path_factory.mktemp("layer")
    plan = write_fixes_plan(FIXES, home, tree=release("0.33.0"), names={"glm5next-recoverssm"})
    return {"stock": run(home, None), "fixed": run(home, plan)}


def test_the_fix_is_on_with_its_plan_only(runs: dict[str, dict[str, Any]]) -> None:
    assert [runs["stock"]["fixed"], runs["fixed"]["fixed"]] == [False, True]


def test_every_token_is_written(runs: dict[str, dict[str, Any]]) -> None:
    for steps in (runs["stock"]["steps"], runs["fixed"]["steps"]):
        assert [unwritten for _, unwritten in steps] == [False] * len(steps)


def test_every_step_s_output_is_stock_s(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["fixed"]["steps"] == runs["stock"]["steps"]
