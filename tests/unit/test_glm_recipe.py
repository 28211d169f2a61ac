"""GLM-5.3-Flash's recipe: each variant meets its fixes' needs, and what would not is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_overlay.capacity import KvMemory
from vllm_overlay.errors import ConfigError
from vllm_overlay.fix import check_needs, load_fixes
from vllm_overlay.modelconfig import ModelConfig, read_model_config
from vllm_overlay.needs import Subject
from vllm_overlay.recipe import Recipe, load_recipe
from vllm_overlay.selection import choose

ROOT = Path(__file__).parents[2]
FIXES = load_fixes(ROOT / "fixes")
FIX = FIXES["glm5next-recoverssm"]
FLAG = "VLLM_GLM5NEXT_RECOVERSSM"
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv-transfer-config": {"kv_connector": "NixlConnector"}}, "kv-transfer-config"),
        ({"kv-offloading-size": 8}, "kv-offloading-size"),
    ],
)
def test_flags_that_a_deferred_commit_cannot_serve(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    recipe = load_recipe("glm53-flash", folder=ROOT / "recipes")
    serve = {**recipe.serve, **change}
    for value in ("1", "fast"):
        errors, _ = check_needs(FIX, subject(tmp_path, serve, {**recipe.env, FLAG: value}))
        assert [said in str(error) for error in errors] == [True] * (value == "fast")


@pytest.mark.parametrize("value", ["1", "fast"])
def test_a_recipe_can_choose_the_form(value: str, tmp_path: Path) -> None:
    recipe = recipe_with(value, tmp_path)
    assert check_needs(FIX, subject(tmp_path, recipe.serve, recipe.env)) == ([], [])
    (choice,) = [each for each in choose(recipe, FIXES, {}) if each.fix is FIX]
    assert choice.value == value and choice.on


def test_there_is_no_other_form(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected 0 or 1 or fast"):
        choose(recipe_with("faster", tmp_path), FIXES, {})


def recipe_with(value: str, folder: Path) -> Recipe:
    written = yaml.safe_load((ROOT / "recipes" / "glm53-flash.yaml").read_text())
    assert FLAG not in written["env"]  # the exact form is the default
    written["env"][FLAG] = value
    (folder / "glm53-flash.yaml").write_text(yaml.safe_dump(written))
    return load_recipe("glm53-flash", folder=folder)


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
