"""GLM-5.3-Flash's KDA layers in a world to drive; the fix glm5next-recoverssm must be applied.

The layer's own forward runs, with stand-ins for the kernels of its prefills.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.models.glm5next.common import (
    kda,
    recoverssm,
    recoverssm_deferred,
    recoverssm_deferred_builder,
)
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from tests.support.glm_layer import stand_in_for_prefill_kernels
from tests.support.kda_world import CONV, Sizes, World, convolve


def glm_layer(sizes: Sizes, seed: int, rows: int) -> Any:
    """Return a layer without vLLM's process groups, with ``rows`` rows of records."""
    s, make = sizes, torch.Generator().manual_seed(seed)
    made = kda.Glm5NextLinearAttention.__new__(kda.Glm5NextLinearAttention)
    torch.nn.Module.__init__(made)
    conv = torch.zeros(s.blocks, CONV - 1 + s.num_spec, 3 * s.projection, dtype=s.activation)
    state = torch.zeros(s.blocks, s.heads, s.head_dim, s.head_dim, dtype=s.dtype)
    weight = torch.randn(3 * s.projection, CONV, generator=make)
    parts = {
        "prefix": "layer",
        "num_spec": s.num_spec,
        "local_num_heads": s.heads,
        "head_dim": s.head_dim,
        "local_projection_size": s.projection,
        "kda_safe_gate": True,
        "kda_lower_bound": s.lower_bound,
        "kda_prefill_backend": "triton",
        "_conv_state_dim_first": kda.is_conv_state_dim_first(),
        "_merged_conv_weight": weight.to(s.device, s.activation),
        "q_conv1d": SimpleNamespace(bias=None),
        # Slow decays: a state remembers what was folded into it wrongly.
        "A_log": (torch.rand(1, 1, s.heads, 1, generator=make) / 2).to(s.device),
        "dt_bias": (torch.randn(s.projection, generator=make) - 3).to(s.device),
        "kv_cache": (conv.to(s.device), state.to(s.device)),
        "recoverssm_records": recoverssm.allocate_records(
            rows, s.heads, s.head_dim, s.window, torch.float32, torch.device(s.device)
        ),
    }
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made


class GlmWorld(World):
    """``deferred``: the flag's value is ``fast``, else ``1``."""

    def __init__(self, sizes: Sizes, *, deferred: bool) -> None:
        stand_in_for_prefill_kernels()
        if sizes.device == "cpu":
            kda.causal_conv1d_update = convolve
        self.deferred = deferred
        super().__init__(sizes)

    def layer(self, seed: int) -> Any:
        slots = self.sizes.slots
        rows = recoverssm_deferred.rows_by_slot(slots) if self.deferred else slots
        return glm_layer(self.sizes, seed, rows)

    def builder(self, names: list[str]) -> tuple[Any, Any]:
        backend = recoverssm.Glm5NextRecoverSSMBackend
        if self.deferred:
            backend = recoverssm_deferred_builder.Glm5NextDeferredBackend
        device = torch.device(self.sizes.device)
        return backend, backend.get_builder_cls()(self.spec, names, self.config, device)

    def model_state(self, device: torch.device) -> Any:
        form = recoverssm_deferred_builder if self.deferred else recoverssm
        stock = MambaHybridModelState.__init__
        MambaHybridModelState.__init__ = lambda state: self.init_state(state, device)
        try:
            return form.model_state_cls()()
        finally:
            MambaHybridModelState.__init__ = stock

    def run(self, layer: Any, metadata: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        mixed, gate, beta = inputs
        out = torch.full_like(gate, float("nan"))
        forward = SimpleNamespace(attn_metadata={layer.prefix: metadata})
        kda.get_forward_context = lambda: forward
        layer._forward(mixed.clone(), gate, beta, out)
        if metadata.num_prefills:
            return out[:, metadata.spec_token_indx]
        return out[:, : metadata.num_spec_decode_tokens]

    def flush(self, slots: list[int], blocks: list[int]) -> None:
        rows, firsts = (
            torch.tensor(each, dtype=torch.int32, device=self.table.device)
            for each in (slots, blocks)
        )
        for number, (group,) in enumerate(self.attn_groups):
            group.get_metadata_builder(0).fold(rows, self.ids(number, firsts))

    def records(self, layer: Any) -> list[torch.Tensor]:
        records = layer.recoverssm_records
        return [records.data.view(records.rows, -1)]
