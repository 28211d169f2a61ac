"""The fix kimi-k3-deferred-recoverssm beside vLLM 0.33.0's own code, in Triton's interpreter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.kernels import FIXES, interpreted, release
from tests.support.plans import write_fixes_plan
from vllm_overlay.upstream import Tree

FIX = FIXES / "kimi-k3-deferred-recoverssm"
NAMES = [
    "kernels_by_size",
    "folds_happen_once",
    "a_flush_writes_no_old_boundary",
    "counts_are_set_and_cleared",
    "streamed_input",
    "installing",
    "records_come_first",
    "against_float64",
    "schedule_without_prefix_cache",
    "aligned_schedule",
]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return release("0.33.0")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tree: Tree) -> dict[str, str]:
    """What went wrong in each case: a traceback, or nothing."""
    home = tmp_path_factory.mktemp("kimi")
    plan = write_fixes_plan(FIXES, home, tree=tree, names={FIX.name})
    done = interpreted("-m", "tests.support.kimi_checks", home=home, plan=plan, tree=tree)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_case(results: dict[str, str], name: str) -> None:
    assert not results[name], results[name]


HOOKED = """
from types import SimpleNamespace as S
import tests.support.interpreter
import torch
from vllm.models.kimi_k3.nvidia import kda, model_state
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.model_states.recoverssm import RecoverSSMState
from tests.support.kda_world import Sizes, config
from tests.support.kimi_world import Layer

def init(self, vllm_config, model, encoder_cache, device):
    self.recoverssm = RecoverSSMState() if vllm_config.cache_config.use_kda_recoverssm else None
    self.max_num_reqs, self.device = 4, device

MambaHybridModelState.__init__ = init
layer = Layer(Sizes(), 0)
model = S(model=S(layers=[S(self_attn=layer)]), specialized_decode_config=None)
state = model_state.KimiK3ModelState(config(Sizes()), model, None, torch.device("cpu"))
print(type(state.recoverssm).__module__, layer.deferred_recoverssm)
print(layer.recoverssm_records.correction.shape[0])
moved = config(Sizes())
moved.kv_transfer_config = S(is_kv_transfer_instance=True)
for refused in (moved, S(**{**vars(config(Sizes())), "use_v2_model_runner": False})):
    try:
        kda.KimiK3DeltaAttention(None, refused)
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize(("value", "rows"), [("1", 2 * 5), ("flush", 5)])
def test_the_hooks_install_it(tmp_path: Path, tree: Tree, value: str, rows: int) -> None:
    """Through a plan, as a worker of a server has it."""
    folder = tmp_path / "fixes" / FIX.name
    shutil.copytree(FIX, folder)
    manifest = folder / "fix.yaml"
    manifest.write_text(
        manifest.read_text().replace("  values:", f'  default: "{value}"\n  values:')
    )
    plan = write_fixes_plan(tmp_path / "fixes", tmp_path, tree=tree)
    done = interpreted("-c", HOOKED, home=tmp_path, plan=plan, tree=tree)
    assert done.returncode == 0, done.stderr[-4000:]
    said = done.stdout.splitlines()[-4:]
    package = "vllm.models.kimi_k3.nvidia.specialized_decode.recoverssm"
    assert said[:2] == [f"{package}.state True", str(rows)]
    assert "does not support KV connectors" in said[2]
    assert "does not support the V1 model runner" in said[3]
