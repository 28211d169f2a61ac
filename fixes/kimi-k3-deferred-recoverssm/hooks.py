"""Installs the deferred RecoverSSM when Kimi-K3's model state is made, and refuses what it breaks.

Everything is bound to objects, in this order: the layers exist, the model state follows once the
weights are loaded, and metadata builders and commit contexts only after it.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import vllm.envs as envs

FLAG = "VLLM_KIMI_K3_DEFERRED_RECOVERSSM"


def install(module: ModuleType) -> dict[str, Any]:
    """Wrap ``KimiK3ModelState.__init__`` so that a new state and its model's layers defer."""
    cls = module.KimiK3ModelState
    original = cls.__init__
    if not hasattr(original, "deferred_recoverssm"):

        @functools.wraps(original)
        def __init__(self: Any, vllm_config: Any, model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, vllm_config, model, *args, **kwargs)
            from vllm.models.kimi_k3.nvidia.specialized_decode.recoverssm import state

            state.install_layers(
                self.language_model.model.layers, fused=getattr(envs, FLAG) != "flush"
            )
            state.install_model_state(self)

        __init__.deferred_recoverssm = True  # type: ignore[attr-defined]
        cls.__init__ = __init__
    return {"KimiK3ModelState.__init__": cls.__init__}


def refuse(module: ModuleType) -> dict[str, Any]:
    """Wrap ``KimiK3DeltaAttention.__init__`` so that a model is not built, and no weight loaded,
    for a server that moves states out of the KV cache: they lack the pending tokens there."""
    cls = module.KimiK3DeltaAttention
    original = cls.__init__
    if not hasattr(original, "deferred_recoverssm"):

        @functools.wraps(original)
        def __init__(self: Any, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            check(vllm_config)
            original(self, config, vllm_config, *args, **kwargs)

        __init__.deferred_recoverssm = True  # type: ignore[attr-defined]
        cls.__init__ = __init__
    return {"KimiK3DeltaAttention.__init__": cls.__init__}


def check(vllm_config: Any) -> None:
    """Raise ValueError for what a state with pending tokens cannot serve."""
    if not vllm_config.cache_config.use_kda_recoverssm:
        return
    transfer = vllm_config.kv_transfer_config
    reasons = {
        "KV connectors (P/D disaggregation, KV cache offload)": transfer is not None
        and transfer.is_kv_transfer_instance,
        f"--mamba-cache-mode {vllm_config.cache_config.mamba_cache_mode}": (
            vllm_config.cache_config.mamba_cache_mode not in ("none", "align")
        ),
        "the V1 model runner": not vllm_config.use_v2_model_runner,
    }
    for what, found in reasons.items():
        if found:
            raise ValueError(f"{FLAG}: deferred RecoverSSM does not support {what}; set {FLAG}=0")
