"""Kimi-K3's KDA layers in a world to drive; the fix kimi-k3-deferred-recoverssm must be applied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.models.kimi_k3.nvidia import kda, kda_metadata
from vllm.models.kimi_k3.nvidia.kda_metadata import (
    KimiK3KDAAttentionBackend,
    KimiK3KDAMetadataBuilder,
)
from vllm.models.kimi_k3.nvidia.model_state import KimiK3ModelState
from vllm.models.kimi_k3.nvidia.ops.recoverssm import KDARecoverSSMRecords
from vllm.models.kimi_k3.nvidia.specialized_decode.recoverssm import state as deferred
from vllm.models.kimi_k3.nvidia.specialized_decode.recoverssm.context import KDARecoverSSMDeferred

from tests.support.kda_world import CONV, Sizes, World, convolve


def stage(
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    staged_state_indices: torch.Tensor,
    staged_query_start_loc: torch.Tensor,
    staged_num_accepted_tokens: torch.Tensor,
    *,
    num_spec_decodes: int,
) -> None:
    """vLLM's ``stage_spec_decode_metadata``, which wants a GPU, in torch."""
    n = num_spec_decodes
    staged_state_indices[:n], staged_state_indices[n:] = state_indices[:n], 0
    staged_query_start_loc[: n + 1] = query_start_loc[: n + 1]
    staged_query_start_loc[n + 1 :] = query_start_loc[n]
    staged_num_accepted_tokens[:n], staged_num_accepted_tokens[n:] = num_accepted_tokens[:n], 1


class Layer:
    """What ``_recoverssm_verify`` needs of a KDA layer."""

    _recoverssm_verify = kda.KimiK3DeltaAttention._recoverssm_verify

    def __init__(self, sizes: Sizes, seed: int) -> None:
        s = sizes
        make = torch.Generator().manual_seed(seed)
        self.use_recoverssm = True
        self.recoverssm_backend = "triton"
        self.recoverssm_verify = None
        self.recoverssm_records = KDARecoverSSMRecords.allocate(
            s.slots, s.heads, s.window, s.head_dim, s.activation, torch.device(s.device)
        )
        self.local_num_heads, self.head_dim = s.heads, s.head_dim
        self.local_projection_size, self.spec_query_len = s.projection, s.window
        self.gate_lower_bound = s.lower_bound
        self.conv1d = SimpleNamespace(bias=None)
        self.conv_weight = torch.randn(3 * s.projection, CONV, generator=make).to(s.device)
        # Slow decays: a state remembers what was folded into it wrongly.
        self.A_log = (torch.rand(s.heads, generator=make) / 2).to(s.device)
        self.dt_bias = (torch.randn(s.projection, generator=make) - 3).to(s.device)
        conv = torch.zeros(s.blocks, CONV - 1 + s.num_spec, 3 * s.projection, dtype=s.activation)
        state = torch.zeros(s.blocks, s.heads, s.head_dim, s.head_dim, dtype=s.dtype)
        self.kv_cache = (conv.to(s.device), state.to(s.device))


class KimiWorld(World):
    """``fused``: None is stock, else whether the verify folds."""

    def __init__(self, sizes: Sizes, fused: bool | None = None) -> None:
        if sizes.device == "cpu":
            kda_metadata.stage_spec_decode_metadata = stage
            kda.causal_conv1d_update = convolve
            deferred.causal_conv1d_update = convolve
        self.fused = fused
        super().__init__(sizes)
        if fused is not None:
            deferred.install_model_state(self.state)

    def layer(self, seed: int) -> Layer:
        made = Layer(self.sizes, seed)
        if self.fused is not None:
            deferred.install_layers([SimpleNamespace(self_attn=made)], fused=self.fused)
        return made

    def builder(self, names: list[str]) -> tuple[Any, Any]:
        device = torch.device(self.sizes.device)
        return KimiK3KDAAttentionBackend, KimiK3KDAMetadataBuilder(
            self.spec, names, self.config, device
        )

    def model_state(self, device: torch.device) -> Any:
        state = object.__new__(KimiK3ModelState)
        self.init_state(state, device)
        return state

    def run(self, layer: Any, metadata: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """As the layer's ``_forward`` picks the tokens."""
        m, (mixed, gate, beta) = metadata, inputs
        tokens = torch.arange(m.num_spec_decode_tokens, device=mixed.device)
        if m.num_prefills or m.num_decodes:
            if m.spec_token_start is not None:
                tokens = tokens + m.spec_token_start
            else:
                tokens = m.spec_token_indx
        starts = m.spec_query_start_loc[: m.num_spec_decodes + 1]
        picked = (mixed[tokens], gate[:, tokens], beta[:, tokens])
        out: torch.Tensor = layer._recoverssm_verify(m, *picked, layer.conv_weight, starts, None)
        return out

    def flush(self, slots: list[int], blocks: list[int]) -> None:
        device = self.table.device
        firsts = torch.tensor(blocks, dtype=torch.int32, device=device)
        for number, groups in enumerate(self.attn_groups):
            context = groups[0].get_metadata_builder(0).recoverssm_context
            if context is None:
                continue
            KDARecoverSSMDeferred(
                record_rows=torch.tensor(slots, dtype=torch.int32, device=device),
                pending=self.state.recoverssm.pending,
                eager=None,
                context=context,
                state_indices=self.ids(number, firsts),
            ).flush()

    def records(self, layer: Any) -> list[torch.Tensor]:
        return [layer.recoverssm_records.key_gate, layer.recoverssm_records.correction]
