"""Gives GLM-5.3-Flash's models the model state that commits their KDA layers' tokens."""

from types import ModuleType
from typing import Any


def install(module: ModuleType) -> dict[str, object]:
    """Hook on `vllm.models.glm5next.common.model`."""

    def get_model_state_cls(self: Any) -> type:
        from vllm.models.glm5next.common import recoverssm

        if recoverssm.is_deferred():
            from vllm.models.glm5next.common import recoverssm_deferred_builder

            return recoverssm_deferred_builder.model_state_cls()
        return recoverssm.model_state_cls()

    changed: dict[str, object] = {}
    for name in ("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration"):
        getattr(module, name).get_model_state_cls = get_model_state_cls
        changed[f"{name}.get_model_state_cls"] = get_model_state_cls
    return changed
