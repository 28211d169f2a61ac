"""glm5next-recoverssm with the flag ``fast`` beside its exact form, in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.kernels import FIXES, interpreted, release
from tests.support.plans import write_fixes_plan
from vllm_overlay.upstream import Tree

FIX = "glm5next-recoverssm"
CASES = [
    "folds_happen_once",
    "counts_are_set_and_cleared",
    "streamed_input",
    "prefills_see_no_pending_tokens",
    "eager_rows_commit_at_once",
    "groups_alone",
    "an_eager_fold_is_the_exact_form_s",
    "launches_do_not_grow_with_groups",
    "a_new_cache_is_followed",
    "the_receipt_says_which_kernel",
    "too_many_rows",
    "schedule_without_prefix_cache",
    "aligned_schedule",
]
MUTANTS = [
    "mutant_kept_for_the_next_owner",
    "mutant_folded_twice",
    "mutant_one_half",
    "mutant_old_count_kept",
    "mutant_nothing_eager",
    "mutant_warm_ups_own_slots",
    "mutant_blocks_of_the_first_group",
]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return release("0.33.0")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tree: Tree) -> dict[str, str]:
    """What went wrong in each case: a traceback, or nothing."""
    home = tmp_path_factory.mktemp("fast")
    plan = write_fixes_plan(FIXES, home, tree=tree, names={FIX}, values={FIX: "fast"})
    found: dict[str, str] = {}
    for names in (CASES, MUTANTS):
        code = ("-m", "tests.support.glm_checks", *names)
        done = interpreted(*code, home=home, plan=plan, tree=tree)
        assert done.returncode == 0, done.stderr[-4000:]
        lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
        found |= dict(json.loads(line) for line in lines)
    return found


@pytest.mark.parametrize("name", [*CASES, *MUTANTS])
def test_case(results: dict[str, str], name: str) -> None:
    assert not results[name], results[name]


CHOSEN = """
import json
from types import SimpleNamespace as S
import tests.support.interpreter
from vllm.models.glm5next.common import kda, model, recoverssm
from tests.support.kda_world import Sizes, config

backend = kda.Glm5NextLinearAttention.get_attn_backend(None)
builder = backend.get_builder_cls()
classes = (model.Glm5NextForCausalLM, model.Glm5NextForConditionalGeneration)
found = {
    "backend": backend.get_name(),
    "builder": builder.__name__,
    "states": [cls.get_model_state_cls(S()).__name__ for cls in classes],
    "rows": kda.record_rows(config(Sizes())),
}
moved, found["refused"] = config(Sizes()), ""
moved.kv_transfer_config = S(is_kv_transfer_instance=False)
kda.record_rows(moved)
moved.kv_transfer_config.is_kv_transfer_instance = True
try:
    kda.record_rows(moved)
except RuntimeError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.parametrize("value", ["1", "fast"])
def test_the_flag_chooses_the_form(tmp_path: Path, tree: Tree, value: str) -> None:
    """Through a plan, as a worker of a server has it; four requests."""
    plan = write_fixes_plan(FIXES, tmp_path, tree=tree, names={FIX}, values={FIX: value})
    done = interpreted("-c", CHOSEN, home=tmp_path, plan=plan, tree=tree)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    refused = found.pop("refused")
    fast = value == "fast"
    kind = "Deferred" if fast else "RecoverSSM"
    assert found == {
        "backend": "GLM5NEXT_KDA_RECOVERSSM" + "_DEFERRED" * fast,
        "builder": f"Glm5Next{kind}MetadataBuilder",
        "states": [f"Glm5Next{kind}ModelState"] * 2,
        "rows": 2 * (4 + 1) if fast else 4,
    }
    assert ("pending tokens; set VLLM_GLM5NEXT_RECOVERSSM=1" in refused) is fast
