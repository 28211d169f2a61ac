"""GLM-5.3-Flash's KDA layer with its real metadata builder, with and without RecoverSSM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernels import FIXES, interpreted, release
from tests.support.plans import write_fixes_plan


def run(home: Path, plan: Path | None, module: str = "glm_layer") -> dict[str, Any]:
    done = interpreted(
        "-m", f"tests.support.{module}", home=home, plan=plan, tree=release("0.33.0")
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    home = tmp_path_factory.mktemp("layer")
    plan = write_fixes_plan(FIXES, home, tree=release("0.33.0"), names={"glm5next-recoverssm"})
    return {
        "stock": run(home, None),
        "fixed": run(home, plan),
        "builder": run(home, plan, "glm_builder"),
    }


def test_the_fix_is_on_with_its_plan_only(runs: dict[str, dict[str, Any]]) -> None:
    assert [runs["stock"]["fixed"], runs["fixed"]["fixed"]] == [False, True]


def test_every_token_is_written(runs: dict[str, dict[str, Any]]) -> None:
    for steps in (runs["stock"]["steps"], runs["fixed"]["steps"]):
        assert [unwritten for _, unwritten in steps] == [False] * len(steps)


def test_every_step_s_output_is_stock_s(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["fixed"]["steps"] == runs["stock"]["steps"]


def test_the_builder_sends_each_row_the_right_way(runs: dict[str, dict[str, Any]]) -> None:
    found = runs["builder"]
    table = found["table"]
    # Longer than the records are: a dummy row of a wide graph runs as a prefill.
    assert found["longer than the window"]["verifying"] == 0
    assert found["longer than the window"]["prefills"] == 1
    assert found["padded"] == {
        "verifying": 2,
        "prefills": 0,
        "blocks": [table[0], table[2], 0, 0],
        "start": [0, 4, 6, 6, 6],
        "commits": [table[0], table[2]],
    }
    assert found["mixed"] == {
        "verifying": 1,
        "prefills": 1,
        "blocks": [table[1]],
        "start": [0, 3],
        "commits": [table[1]],
    }
    assert found["one prompt token"]["commits"] is None
    assert found["aligned"] == [7, 8]


def test_other_groups_put_their_blocks_into_what_one_has_built(
    runs: dict[str, dict[str, Any]],
) -> None:
    kinds = ("padded", "mixed", "prefills", "checkpoints")
    assert runs["builder"]["other groups"] == {kind: [] for kind in kinds}


def test_a_commit_never_writes_to_a_cache_that_is_gone(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["builder"]["context kept"] and runs["builder"]["context of a new cache"]


def test_what_it_cannot_serve_is_refused_at_the_start(runs: dict[str, dict[str, Any]]) -> None:
    refusals = runs["builder"]["refusals"]
    assert [name for name, said in refusals.items() if not said] == ["as it is", "align"]
    assert "96" in refusals["head dim"] and "4 tokens" in refusals["short block"]
    assert len(set(refusals.values())) == len(refusals) - 1


def test_both_models_get_the_commit_hook(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["builder"]["state"] == ["MambaHybridModelState"] * 2
