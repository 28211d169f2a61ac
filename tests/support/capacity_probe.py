"""Asks a release's own code for the sizes of a hybrid model's caches.

Run with a release's folder as the argument: reads a JSON list of cases on standard input and
writes one JSON object a case, as its last line. Only what describes the layers is made up here;
shapes, alignment, groups and sizes come from vLLM.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock, patch


class _Torchvision:
    """Stands for torchvision, which the model's file imports and nothing here uses."""

    class Module(types.ModuleType):
        __version__ = "0.0.0"
        __path__: ClassVar[list[str]] = []

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock()

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, cls, is_package=True)  # type: ignore[arg-type]
        return None

    @classmethod
    def create_module(cls, spec: Any) -> types.ModuleType:
        return cls.Module(spec.name)

    @staticmethod
    def exec_module(module: Any) -> None:
        pass


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's own figures for a case."""
    import torch
    from vllm.platforms.interface import Platform
    from vllm.v1.core import kv_cache_planning, kv_cache_utils

    config = _vllm_config(case)
    model, backends = _model(case)
    dtype = {"auto": torch.bfloat16}.get(case["kv_cache_dtype"], torch.uint8)
    with (
        patch(
            "vllm.model_executor.models.ModelRegistry.resolve_model_cls",
            lambda *_, **__: (model, ""),
        ),
        patch.object(Platform, "_find_non_ssm_backends", lambda *_: backends),
        patch("vllm.config.vllm.set_current_vllm_config", MagicMock()),
        patch("vllm.v1.attention.backends.mla.indexer.get_current_vllm_config", lambda: config),
        patch(
            "vllm.v1.attention.backends.mla.indexer.get_paged_mqa_page_sizes",
            lambda: (64,) if case["major"] == 12 else (32, 64),
        ),
        patch(
            "vllm.model_executor.layers.mamba.abstract.get_mamba_prefill_checkpoint_alignment",
            lambda _: 16 if case["fused_prefill"] else None,
        ),
    ):
        if case["block_size"] is None:
            config.cache_config.block_size = Platform._preferred_block_size_for_backends(
                backends, 16, config
            )
        Platform._align_hybrid_block_size(config, backends[0])
    specs = _specs(case, config, dtype)
    groups = kv_cache_planning.get_kv_cache_groups(config, dict(specs))
    block_bytes = kv_cache_planning._pool_bytes_per_block(config, groups)
    planned = SimpleNamespace(num_blocks=1, kv_cache_groups=groups, hisparse_host_num_blocks=None)
    share = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, planned)
    state = next(spec for name, spec in specs.items() if name.startswith("state"))
    return {
        "state": state.real_page_size_bytes,
        "page": state.page_size_bytes,
        "block_tokens": config.cache_config.block_size,
        "block_bytes": block_bytes,
        "blocks_of_longest": round(1 / share),
    }


def _vllm_config(case: dict[str, Any]) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheLayout

    layout = KVCacheLayout.BLHNC if case["family"] == "glm" else KVCacheLayout.LBHNC
    text = SimpleNamespace(
        linear_num_heads=case["heads"],
        linear_head_dim=case["head_size"],
        linear_conv_kernel_dim=case["conv_width"],
        index_kpool=case["pool"],
        linear_attn_config={
            "num_heads": case["heads"],
            "head_dim": case["head_size"],
            "short_conv_kernel_size": case["conv_width"],
        },
    )
    cache = SimpleNamespace(
        cache_dtype=case["kv_cache_dtype"],
        block_size=case["block_size"] or 16,
        user_specified_block_size=case["block_size"] is not None,
        mamba_cache_mode=case["mode"],
        mamba_block_size=case["max_model_len"],
        mamba_page_size_padded=None,
        mamba_cache_dtype="auto",
        mamba_ssm_cache_dtype=case["state_dtype"],
        use_replayssm=case["one_state"],
        kv_cache_dtype_skip_layers=[],
        get_resolved_kv_cache_layout=lambda: layout,
    )
    return SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(
            use_mla=True,
            dtype=torch.bfloat16,
            architecture="",
            max_model_len=case["max_model_len"],
            hf_text_config=text,
            hf_config=text,
            get_num_kv_heads=lambda _: 1,
            get_head_size=lambda: case["latent"],
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=case["ranks"], decode_context_parallel_size=1
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=case["drafts"]),
        num_speculative_tokens=case["drafts"],
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
    )


def _model(case: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return the model's class and its attention backends on this GPU."""
    if case["family"] == "glm":
        from vllm.models.glm5next.common.model import Glm5NextForCausalLM
        from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
        from vllm.v1.attention.backends.mla.indexer import (
            Glm5NextIndexerBackend,
            KpoolTailBackend,
        )

        return Glm5NextForCausalLM, [
            FlashMLASparseBackend,
            Glm5NextIndexerBackend,
            KpoolTailBackend,
        ]
    from vllm.models.kimi_k3.nvidia.model import KimiLinearForCausalLM
    from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend

    return KimiLinearForCausalLM, [FlashMLABackend]


def _specs(case: dict[str, Any], config: Any, dtype: Any) -> dict[str, Any]:
    """Return what each layer says of its cache, in the model's own classes."""
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows

    if case["family"] == "glm":
        from vllm.models.glm5next.common.kda import Glm5NextLinearAttention as State
    else:
        from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention as State

    state = _bare(
        State,
        tp_size=case["ranks"],
        num_heads=case["heads"],
        head_dim=case["head_size"],
        conv_size=case["conv_width"],
        num_spec=case["drafts"],
        model_config=config.model_config,
        cache_config=config.cache_config,
        kda_prefill_backend="flashkda" if case["fused_prefill"] else "triton",
    )
    attention = _bare(
        MLAAttention,
        kv_cache_dtype=case["kv_cache_dtype"],
        head_size=case["latent"],
        sliding_window=None,
        topk_buffer_width=None,
        indexer=None,
        non_causal_multi_token_decode=False,
    )
    with patch(
        "vllm.model_executor.layers.attention.mla_attention.kv_cache_dtype_str_to_dtype",
        lambda *_: dtype,
    ):
        token = attention.get_kv_cache_spec(config)
    specs = {f"state.{i}": state.get_kv_cache_spec(config) for i in range(case["state_layers"])}
    if case["family"] == "kimi":
        return {**specs, **{f"attention.{i}": token for i in range(case["attention_layers"])}}
    from vllm.models.glm5next.common.attention import Glm5NextIndexerCache, Glm5NextTailCache

    size = case["indexer_head"]
    parts = {"cache_config": config.cache_config, "_index_kpool": case["pool"]}
    index = _bare(Glm5NextIndexerCache, head_dim=size + size // 32, dtype=torch.uint8, **parts)
    tail = _bare(Glm5NextTailCache, head_dim=size, dtype=torch.bfloat16, **parts)
    for i in range(case["attention_layers"]):
        specs[f"attention.{i}"] = align_blocks_to_rows(token)
        specs[f"index.{i}"] = index.get_kv_cache_spec(config)
        specs[f"tail.{i}"] = tail.get_kv_cache_spec(config)
    return specs


def _bare(owner: Any, **attributes: Any) -> Any:
    """Return an instance with only the attributes that its cache specification reads."""
    import torch

    made = owner.__new__(owner)
    torch.nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


if __name__ == "__main__":
    sys.meta_path.insert(0, _Torchvision)  # type: ignore[arg-type]
    sys.path.insert(0, sys.argv[1])
    print(json.dumps([answer(case) for case in json.load(sys.stdin)]))
