"""GLM-5.3-Flash's recipe: each variant meets its fixes' needs, and what would not is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_overlay.capacity import KvMemory
from vllm_overlay.fix import check_needs, load_fixes
from vllm_overlay.modelconfig import ModelConfig, read_model_config
from vllm_overlay.needs import Subject
from vllm_overlay.recipe import load_recipe

ROOT = Path(__file__).parents[2]
FIX = load_fixes(ROOT / "fixes")["glm5next-recoverssm"]
VARIANTS = {None: 64, "tp2": 16, "tp3": 64, "tp6": 64, "stock": 32, "tp2-stock": 4}
CONFIG = """{
  "architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next", "dtype": "bfloat16",
  "text_config": {
    "model_type": "glm5_next_text", "num_hidden_layers": 8, "hidden_size": 4096,
    "linear_head_dim": DIM, "linear_num_heads": 48, "linear_conv_kernel_dim": 4,
    "num_attention_heads": 48, "kv_lora_rank": 512, "qk_rope_head_dim": 0,
    "index_head_dim": 128, "index_kpool": 16, "num_nextn_predict_layers": 1,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention",
      "deepseek_sparse_attention", "linear_attention", "linear_attention", "linear_attention",
      "deepseek_sparse_attention"]
  }
}"""


def config(folder: Path, dim: int = 128) -> ModelConfig:
    (folder / "config.json").write_text(CONFIG.replace("DIM", str(dim)))
    return read_model_config(folder, None)


def subject(
    folder: Path,
    serve: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    dim: int = 128,
    gib: float = 64,
) -> Subject:
    memory = KvMemory(int(gib * 2**30), None, "kv-cache-memory-bytes")
    return Subject({**serve}, env or {}, config(folder, dim), memory, "9.0")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_tuned_and_meets_the_needs(variant: str | None, tmp_path: Path) -> None:
    recipe = load_recipe("glm53-flash", folder=ROOT / "recipes", variant=variant)
    assert recipe.serve["max-num-seqs"] == VARIANTS[variant]
    stock = variant is not None and variant.endswith("stock")
    assert ("glm5next-recoverssm" in recipe.fixes) is not stock
    assert check_needs(FIX, subject(tmp_path, recipe.serve, recipe.env)) == ([], [])
    assert recipe.requires is not None
    assert recipe.requires.gpus == recipe.serve["tensor-parallel-size"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speculative-config": None}, "speculative-config"),
        ({"pipeline-parallel-size": 2}, "pipeline-parallel-size"),
        ({"mamba-cache-mode": "all"}, "mamba-cache-mode"),
    ],
)
def test_flags_that_it_cannot_serve(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    recipe = load_recipe("glm53-flash", folder=ROOT / "recipes")
    errors, _ = check_needs(FIX, subject(tmp_path, {**recipe.serve, **change}, recipe.env))
    assert said in "\n".join(map(str, errors))


def test_the_old_model_runner(tmp_path: Path) -> None:
    recipe = load_recipe("glm53-flash", folder=ROOT / "recipes")
    env = {**recipe.env, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    (error,) = check_needs(FIX, subject(tmp_path, recipe.serve, env))[0]
    assert "VLLM_USE_V2_MODEL_RUNNER" in str(error)


def test_a_head_of_another_size(tmp_path: Path) -> None:
    recipe = load_recipe("glm53-flash", folder=ROOT / "recipes")
    errors, _ = check_needs(FIX, subject(tmp_path, recipe.serve, recipe.env, dim=96))
    assert "linear_head_dim" in str(errors[0]) and "96" in str(errors[0])


def test_too_many_requests_for_their_states(tmp_path: Path) -> None:
    recipe = load_recipe("glm53-flash", folder=ROOT / "recipes")
    errors, _ = check_needs(FIX, subject(tmp_path, recipe.serve, recipe.env, gib=0.3))
    assert "max-num-seqs" in str(errors[0]) and "64" in str(errors[0])


def test_a_model_that_is_not_here_yet_is_noted(tmp_path: Path) -> None:
    recipe = load_recipe("glm53-flash", folder=ROOT / "recipes")
    there = subject(tmp_path, recipe.serve, recipe.env)
    errors, notes = check_needs(FIX, replace(there, config=None, memory=None))
    assert not errors and len(notes) == 2
