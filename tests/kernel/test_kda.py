"""RecoverSSM of KDA layers against vLLM's stock kernels, in Triton's interpreter.

The interpreter proves indexing; that sums have the stock kernel's order is claimed from a GPU only.
"""

from __future__ import annotations

import json

import pytest

from tests.support.kernels import FIXES, interpreted, release
from tests.support.plans import write_fixes_plan

NAMES = [
    *(f"window_{window}" for window in range(1, 9)),
    "bf16_state",
    "columns_first",
    "odd_strides",
    "interleaved",
    "padding_rows",
    "layers_of_a_group",
    "around_a_block_of_the_window",
    "around_a_larger_block",
    "null_blocks",
    "plan_integers",
    "groups_commit_together",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in each case: a traceback, or nothing."""
    home = tmp_path_factory.mktemp("kda")
    tree = release("0.33.0")
    plan = write_fixes_plan(FIXES, home, tree=tree, names={"glm5next-recoverssm"})
    run = interpreted("-m", "tests.support.kda_cases", home=home, plan=plan, tree=tree)
    lines = [line for line in run.stdout.splitlines() if line.startswith("[")]
    assert run.returncode == 0, run.stderr
    return dict(json.loads(line) for line in lines)


def test_every_case_has_run(results: dict[str, str]) -> None:
    assert list(results) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_case(results: dict[str, str], name: str) -> None:
    assert not results[name], results[name]
