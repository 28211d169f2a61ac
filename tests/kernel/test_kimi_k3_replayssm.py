"""kimi-k3-replayssm on the real source: 0.29.0 without it, with it, and the releases that carry it.

Every arm builds the same steps with that vLLM's own builder (tests/support/kda_steps.py).
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernels import interpreted
from tests.support.plans import write_fixes_plan
from tests.support.trees import make_diff
from tests.upstream.conftest import RELEASES, release
from vllm_overlay.upstream import Tree

ROOT = Path(__file__).resolve().parents[2]
# On vLLM's platform for CPUs: on none, it would pin memory.
STEPS = """
import os
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
import tests.support.interpreter
from tests.support.kda_steps import main
main()
"""
FIX = ROOT / "fixes" / "kimi-k3-replayssm"
BROKEN, *CARRYING = RELEASES
MODULE = "vllm.models.kimi_k3.nvidia.kda_metadata"
Steps = dict[str, dict[str, Any]]

PREFILL = {
    "num_prefills": 4,  # the padding row counts
    "num_prefill_tokens": 120,
    "starts": [0, 50, 70, 120, 120],
    "states": [2, 9, 20, 25],
    "has_state": [False, False, True, False],
    "offsets": [32, 0, 32, 0],
    "checkpoints": [1, 0, 19, 0],
    "stored": {"1": [29, 30, 31], "19": [99, 100, 101]},
}
NO_VERIFY = {"num_decodes": 0, "num_spec_decodes": 0, "committed": None, "layers": None}


@cache
def steps(tree: Tree, home: Path, plan: Path | None = None) -> Steps:
    """Return what each step became on one vLLM."""
    run = interpreted("-c", STEPS, home=home, plan=plan, tree=tree)
    assert run.returncode == 0, run.stderr
    found: Steps = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def stock(home: Path) -> Steps:
    return steps(release(BROKEN), home)


@pytest.fixture(scope="module")
def fixed(home: Path) -> Steps:
    tree = release(BROKEN)
    return steps(tree, home, write_fixes_plan(FIX.parent, home, tree=tree, names=[FIX.name]))


@pytest.mark.parametrize("step", ["capture", "verify", "mixed"])
def test_without_the_fix_the_builder_does_not_know_its_layers(stock: Steps, step: str) -> None:
    assert stock[step] == {
        "error": "AttributeError: 'KimiK3KDAMetadataBuilder' object has no attribute 'layer_names'",
        "in": "_get_recoverssm_context",
        "line": "layers = [forward_context[layer_name] for layer_name in self.layer_names]",
    }


@pytest.mark.parametrize("step", ["prefill", "one token first"])
def test_without_the_fix_a_prefill_step_reads_a_mask_that_is_not_there(
    stock: Steps, step: str
) -> None:
    name = "active_non_spec_mask_cpu"
    assert stock[step] == {
        "error": f"UnboundLocalError: cannot access local variable '{name}' where it is not "
        "associated with a value",
        "in": "build",
        "line": f"request_rows = {name}.nonzero().flatten().tolist()",
    }


def test_what_worked_is_as_it_was(stock: Steps, fixed: Steps) -> None:
    name = "prefill without cache"
    assert fixed[name] == stock[name]
    assert fixed[name]["offsets"] is None and "error" not in fixed[name]


@pytest.mark.parametrize("step", ["capture", "verify"])
def test_a_verify_step_finds_the_layers_that_it_commits(fixed: Steps, step: str) -> None:
    found = fixed[step]
    assert (found["num_spec_decodes"], found["layers"]) == (2, 2)
    assert found["committed"] == [3, 11 if step == "capture" else 10]
    assert found["offsets"] is None


def test_a_prefill_step_checkpoints_every_row_that_its_start_locations_have(fixed: Steps) -> None:
    """The storing kernel has a program for each offset, and each reads its own row's start."""
    found = fixed["prefill"]
    assert found == PREFILL | NO_VERIFY
    assert len(found["offsets"]) == len(found["states"]) == len(found["starts"]) - 1


def test_a_decode_before_the_prefill_keeps_its_row(fixed: Steps) -> None:
    found = fixed["one token first"]
    assert (found["num_decodes"], found["num_prefills"], found["num_spec_decodes"]) == (1, 1, 0)
    assert (found["starts"], found["offsets"]) == ([0, 1, 51], [0, 32])
    assert found["stored"] == {"9": [30, 31, 32]}


def test_a_mixed_step_checkpoints_the_rows_that_are_not_verified(fixed: Steps) -> None:
    found = fixed["mixed"]
    assert (found["num_spec_decodes"], found["num_prefills"], found["layers"]) == (2, 2, 2)
    assert (found["starts"], found["offsets"]) == ([0, 50, 70], [32, 0])
    assert (found["checkpoints"], found["committed"]) == ([9, 0], [3, 18])
    assert found["stored"] == {"9": [29, 30, 31]}


def test_clearing_the_mask_instead_classifies_every_step_alike(
    fixed: Steps, home: Path, tmp_path: Path
) -> None:
    """vLLM's own repair on the broken release: the README says that the two differ in nothing."""
    tree = release(BROKEN)
    source = tree.source(MODULE)
    assert source is not None
    old = source.decode()
    before = "        spec_request_indices = None\n        if num_spec_decodes == 0:\n"
    assert old.count(before) == 1
    cleared = old.replace(before, before + "            spec_sequence_masks_cpu = None\n")
    fixes = tmp_path / "fixes"
    shutil.copytree(FIX, fixes / FIX.name)
    (fixes / FIX.name / "kda_metadata.diff").write_text(
        make_diff(old, cleared, "models/kimi_k3/nvidia/kda_metadata.py")
    )
    assert steps(tree, home, write_fixes_plan(fixes, home, tree=tree)) == fixed


@pytest.mark.parametrize("version", CARRYING)
def test_a_release_that_carries_the_fix_builds_the_same(
    fixed: Steps, home: Path, version: str
) -> None:
    """What `upstreamed` in fix.yaml promises. From 0.31.0 on, padding counts as no prefill."""
    found = steps(release(version), home)
    assert found.keys() == fixed.keys()
    for name, step in found.items():
        if name == "prefill without cache":  # 0.31.0 makes checkpoints there too
            assert "error" not in step
            continue
        left_out = {"stored", "num_prefills"}
        assert {key: step[key] for key in step.keys() - left_out} == {
            key: fixed[name][key] for key in fixed[name].keys() - left_out
        }, name
