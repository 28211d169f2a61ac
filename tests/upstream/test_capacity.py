"""The arithmetic of a hybrid model's caches against vLLM 0.33.0's own functions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import capacity_probe
from vllm_overlay.capacity import capacity
from vllm_overlay.hybridmodel import hybrid_shape
from vllm_overlay.modelconfig import ModelConfig
from vllm_overlay.upstream import Tree

GLM = {
    "family": "glm",
    "state_layers": 34,
    "attention_layers": 12,
    "heads": 64,
    "head_size": 128,
    "conv_width": 4,
    "latent": 512,
    "pool": 16,
    "indexer_head": 128,
    "ranks": 4,
    "drafts": 7,
    "mode": "align",
    "one_state": False,
    "fused_prefill": True,
    "block_size": None,
    "kv_cache_dtype": "auto",
    "state_dtype": "auto",
    "max_model_len": 65536,
    "major": 9,
}
FEW = {**GLM, "attention_layers": 4, "kv_cache_dtype": "fp8_ds_mla"}
KIMI = {**GLM, "family": "kimi", "state_layers": 20, "attention_layers": 7, "heads": 32,
        "latent": 576, "pool": 2}  # fmt: skip
CASES = [
    GLM,
    {**GLM, "ranks": 1, "one_state": True},
    {**GLM, "ranks": 2, "mode": "none"},
    {**GLM, "ranks": 2, "mode": "none", "one_state": True, "drafts": 3},
    {**GLM, "ranks": 8, "heads": 16, "state_layers": 6, "attention_layers": 3},
    {**GLM, "ranks": 2, "state_dtype": "bfloat16", "fused_prefill": False, "drafts": 0},
    {**GLM, "block_size": 64, "major": 12, "kv_cache_dtype": "fp8_ds_mla"},
    {**GLM, "block_size": 4096, "ranks": 16, "max_model_len": 200_000},
    {**GLM, "state_layers": 3, "attention_layers": 9, "drafts": 20, "pool": 32},
    {**GLM, "heads": 48, "ranks": 3, "kv_cache_dtype": "fp8_ds_mla"},
    {**FEW, "state_layers": 9},
    {**FEW, "state_layers": 9, "kv_cache_dtype": "auto"},
    {**FEW, "state_layers": 14},
    {**FEW, "state_layers": 20},
    KIMI,
    {**KIMI, "ranks": 2, "mode": "none", "drafts": 0},
    {
        **KIMI,
        "ranks": 8,
        "one_state": True,
        "heads": 96,
        "state_layers": 69,
        "attention_layers": 24,
    },
    {**KIMI, "state_layers": 5, "attention_layers": 7, "fused_prefill": False, "block_size": 256},
]


@pytest.fixture(scope="module")
def answers(new_release: Tree) -> list[dict[str, Any]]:
    probe = subprocess.run(
        [sys.executable, Path(capacity_probe.__file__), new_release.root],
        input=json.dumps(CASES),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers: list[dict[str, Any]] = json.loads(probe.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("index", range(len(CASES)))
def test_the_arithmetic_is_vllm_s(answers: list[dict[str, Any]], index: int) -> None:
    case = CASES[index]
    shape = hybrid_shape(ModelConfig(Path("config.json"), config_of(case)))
    assert shape is not None
    result = capacity(
        shape,
        serve_of(case),
        recoverssm=case["one_state"],
        capability=f"{case['major']}.0",
    )
    assert answers[index] == {
        "state": result.state,
        "page": result.page,
        "block_tokens": result.block_tokens,
        "block_bytes": result.block_bytes,
        "blocks_of_longest": result.blocks_of(case["max_model_len"]),
    }


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model with these layers."""
    layers = case["state_layers"] + case["attention_layers"]
    common = {
        "num_hidden_layers": layers,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": case["latent"] - 512,
        "dtype": "bfloat16",
        "max_position_embeddings": 1 << 20,
    }
    if case["family"] == "kimi":
        linear = {
            "kda_layers": list(range(1, case["state_layers"] + 1)),
            "num_heads": case["heads"],
            "head_dim": case["head_size"],
            "short_conv_kernel_size": case["conv_width"],
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0 if case["fused_prefill"] else None,
        }
        return {"model_type": "kimi_linear", **common, "linear_attn_config": linear}
    kinds = ["linear_attention"] * case["state_layers"]
    text = {
        **common,
        "layer_types": kinds + ["deepseek_sparse_attention"] * case["attention_layers"],
        "linear_num_heads": case["heads"],
        "linear_head_dim": case["head_size"],
        "linear_conv_kernel_dim": case["conv_width"],
        "linear_lower_bound": -5.0 if case["fused_prefill"] else None,
        "index_head_dim": case["indexer_head"],
        "index_kpool": case["pool"],
    }
    return {"model_type": "glm5_next", "text_config": text}


def serve_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the serve flags of a case; the draft adds no layers: they are in its counts."""
    flags: dict[str, Any] = {
        "tensor-parallel-size": case["ranks"],
        "enable-prefix-caching": case["mode"] == "align",
        "kv-cache-dtype": case["kv_cache_dtype"],
        "mamba-ssm-cache-dtype": case["state_dtype"],
        "max-model-len": case["max_model_len"],
    }
    if case["drafts"]:
        flags["speculative-config"] = {"method": "ngram", "num_speculative_tokens": case["drafts"]}
    if case["block_size"]:
        flags["block-size"] = case["block_size"]
    return flags
