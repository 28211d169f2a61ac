"""Installs the deferred RecoverSSM on Kimi-K3's stock objects; their classes stay as they are.

Stock RecoverSSM passes over every request's state three times a step: the verify reads it, the
commit reads and writes it. Here the commit leaves the accepted tokens as pending records, and the
next verify folds them into the checkpoint on its way: one read, one write.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from einops import rearrange
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadataBuilder
from vllm.models.kimi_k3.nvidia.ops.recoverssm import kda_recoverssm_verify
from vllm.models.kimi_k3.nvidia.specialized_decode.recoverssm.context import (
    FP32_DEFERRED,
    KDADeferredCommitContext,
    KDARecoverSSMDeferred,
    allocate_records,
    as_operands,
)
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu.model_states.recoverssm import RecoverSSMState
from vllm.v1.worker.utils import AttentionGroup

from vllm_overlay.kda.boundary import near_boundary
from vllm_overlay.kda.operands import Window
from vllm_overlay.kda.owners import Owners, is_dummy
from vllm_overlay.kda.verify import fold_verify

FIX = "kimi-k3-deferred-recoverssm"


class DeferredRecoverSSMState(RecoverSSMState):
    """``pending`` int32 [max_num_reqs]: by request slot, the accepted tokens of its last verify
    that its checkpoint does not hold yet. All KV-cache groups share it."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        super().__init__()
        self.pending = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._builders: dict[int, Any] = {}  # by KV-cache group

    def add_request(self, req_index: int) -> None:
        """Forget what the slot's last owner left: a prefill commits its state itself."""
        self.pending[req_index].fill_(0)

    def bind(
        self, attn_groups: list[list[AttentionGroup]], idx_mapping: torch.Tensor | None
    ) -> None:
        """Give the KDA builders the step's request slots [requests], before they build.

        None: the rows belong to no request. A builder seen for the first time is set up. Only the
        builders of ubatch 0: vLLM's hybrid state refuses DBO.
        """
        for group in (group for groups in attn_groups for group in groups):
            builder = group.get_metadata_builder(0)
            if isinstance(builder, KimiK3KDAMetadataBuilder) and builder.use_recoverssm:
                if getattr(builder, "recoverssm_pending", None) is not self.pending:
                    install_builder(builder, self.pending)
                builder.recoverssm_request_slots = idx_mapping
                self._builders[getattr(group, "kv_cache_group_id", 0)] = builder

    def resume(self, req_index: int, block_ids: Any, num_computed_tokens: int) -> None:
        """Fold what is pending for a request that leaves its slot and keeps its blocks.

        ``block_ids``: per KV-cache group, the blocks of the request.
        """
        for group, builder in self._builders.items():
            context = builder.recoverssm_context
            if not isinstance(context, KDADeferredCommitContext):
                continue
            align = builder.vllm_config.cache_config.mamba_cache_mode == "align"
            column = (num_computed_tokens - 1) // builder.kv_cache_spec.block_size if align else 0
            slot, block = (
                async_tensor_h2d([value], dtype=torch.int32, device=self.pending.device)
                for value in (req_index, block_ids[group][column])
            )
            KDARecoverSSMDeferred(slot, self.pending, None, context, block).flush()


class _DeferredStepCommit:
    """The metadata's ``recoverssm_context`` of one step: the commit with the step's operands."""

    def __init__(self, context: KDADeferredCommitContext, deferred: KDARecoverSSMDeferred) -> None:
        self.context, self.deferred = context, deferred

    def commit(self, *args: Any, **kwargs: Any) -> None:
        step = self.deferred
        operands = {"record_rows": step.record_rows, "pending": step.pending, "eager": step.eager}
        self.context.commit(*args, **kwargs, **operands)


def install_model_state(state: Any) -> None:
    """Install the deferral on a ``KimiK3ModelState``; nothing without RecoverSSM, or again.

    Its ``recoverssm`` becomes a ``DeferredRecoverSSMState``; ``add_request`` then clears the new
    request's pending count, and ``prepare_attn`` binds the builders before the metadata is built.
    """
    if state.recoverssm is None or isinstance(state.recoverssm, DeferredRecoverSSMState):
        return
    deferred = DeferredRecoverSSMState(state.max_num_reqs, state.device)
    base_add_request, base_prepare_attn = state.add_request, state.prepare_attn
    base_remove_request = getattr(state, "remove_request", None)
    owners = Owners()

    def remove_request(req_id: str) -> None:
        if base_remove_request is not None:
            base_remove_request(req_id)
        owners.leave(req_id)

    def add_request(req_index: int, new_req_data: Any) -> None:
        base_add_request(req_index, new_req_data)
        left = owners.enter(new_req_data.req_id, req_index)
        if left is not None:  # streamed more input: it is removed and added, and keeps its state
            deferred.resume(left, new_req_data.block_ids, new_req_data.num_computed_tokens)
        deferred.add_request(req_index)

    def prepare_attn(
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: Any,
        for_capture: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        owned = not for_capture and not is_dummy(input_batch)
        deferred.bind(attn_groups, input_batch.idx_mapping if owned else None)
        metadata: dict[str, Any] = base_prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture=for_capture,
            **options,
        )
        return metadata

    state.recoverssm = deferred
    state.add_request, state.remove_request = add_request, remove_request
    state.prepare_attn = prepare_attn


def install_layers(layers: Any, *, fused: bool = True) -> None:
    """Give the Triton RecoverSSM KDA layers among decoder ``layers`` records by slot and the
    deferred verify; others, and those that have them, stay as they are.

    ``fused``: the verify folds. Else a flush before it does, and both are vLLM's own kernels. Must
    come before a commit context takes the records' addresses.
    """
    halves = 2 if fused else 1
    for layer in (getattr(decoder, "self_attn", None) for decoder in layers):
        stock: Any = getattr(layer, "recoverssm_records", None)
        if stock is None or getattr(layer, "deferred_recoverssm", False):
            continue
        kda: Any = layer
        if kda.recoverssm_backend == "triton":
            like = stock.key_gate
            kda.recoverssm_records = allocate_records(
                *stock.correction.shape, like.dtype, like.device, halves=halves
            )
            kda._recoverssm_verify = MethodType(deferred_recoverssm_verify, kda)
            kda.deferred_recoverssm = True


def install_builder(builder: Any, pending: torch.Tensor) -> None:
    """Make a KDA metadata builder defer: its commit context is the ``fp32_deferred`` one unless
    its layers run CuTe, and its metadata have ``recoverssm_deferred``, None if not deferred.

    ``pending`` int32 [max_num_reqs]. Again with another ``pending``: only that changes.
    """
    builder.recoverssm_pending = pending
    builder.recoverssm_request_slots = None
    if getattr(builder, "recoverssm_record_rows", None) is not None:
        return
    known = builder.recoverssm_context
    if known is not None and known.backend == "triton":
        builder.recoverssm_context = None  # the stock commit, taken before this
    config = builder.vllm_config
    max_num_reqs = config.scheduler_config.max_num_seqs
    # Staged: a captured graph reads what the step has put here.
    builder.recoverssm_record_rows = torch.full(
        (max_num_reqs,), -1, dtype=torch.int32, device=builder.device
    )
    base_get_context, base_build = builder._get_recoverssm_context, builder.build

    def get_context() -> Any:
        if builder.recoverssm_context is None:
            known_layers = config.compilation_config.static_forward_context
            layers = [known_layers[name] for name in builder.layer_names]
            if layers[0].recoverssm_backend != "triton":
                return base_get_context()
            builder.recoverssm_context = KDADeferredCommitContext.create(
                layers,
                spec_query_len=1 + config.num_speculative_tokens,
                max_num_reqs=max_num_reqs,
                align=config.cache_config.mamba_cache_mode == "align",
            )
        return builder.recoverssm_context

    def build(
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> Any:
        metadata = base_build(
            common_prefix_len,
            common_attn_metadata,
            num_accepted_tokens=num_accepted_tokens,
            num_decode_draft_tokens_cpu=num_decode_draft_tokens_cpu,
            fast_build=fast_build,
        )
        metadata.recoverssm_deferred = None
        commit, context = metadata.recoverssm_commit, metadata.recoverssm_context
        if commit is not None and context.backend == FP32_DEFERRED:
            deferred = _build_deferred(
                builder,
                common_attn_metadata,
                context,
                metadata.num_spec_decodes,
                commit.request_indices,
                num_decode_draft_tokens_cpu,
                commit.state_indices[:, 0],
            )
            metadata.recoverssm_context = _DeferredStepCommit(context, deferred)
            metadata.recoverssm_deferred = deferred
        return metadata

    builder._get_recoverssm_context = get_context
    builder.build = build


def _build_deferred(
    builder: Any,
    m: Any,
    context: KDADeferredCommitContext,
    num_spec_decodes: int,
    spec_request_indices: torch.Tensor | None,
    num_decode_draft_tokens_cpu: torch.Tensor,
    state_indices: torch.Tensor,
) -> KDARecoverSSMDeferred:
    """Stage the verify rows' slots; with prefix caching, pick the rows to commit eagerly."""
    rows = builder.recoverssm_record_rows
    slots = builder.recoverssm_request_slots
    owned = 0
    if slots is not None:
        if spec_request_indices is not None:
            slots = slots[spec_request_indices]
        owned = min(num_spec_decodes, slots.shape[0])
        rows[:owned].copy_(slots[:owned], non_blocking=True)
    rows[owned : max(num_spec_decodes, m.num_reqs)].fill_(-1)  # padding, read by captured graphs
    eager = None
    if builder.vllm_config.cache_config.mamba_cache_mode == "align":
        near = _rows_near_boundary(builder, m, num_spec_decodes, num_decode_draft_tokens_cpu)
        if near.any().item():
            eager = async_tensor_h2d(near.to(torch.int32), device=state_indices.device)
    return KDARecoverSSMDeferred(
        record_rows=rows,
        pending=builder.recoverssm_pending,
        eager=eager,
        context=context,
        state_indices=state_indices[:num_spec_decodes],
    )


def _rows_near_boundary(
    builder: Any, m: Any, num_spec_decodes: int, num_decode_draft_tokens_cpu: torch.Tensor
) -> torch.Tensor:
    """Return bool [verify rows] on the host, all true where the lengths are not known."""
    assert isinstance(builder.kv_cache_spec, MambaSpec)
    ends = m.seq_lens_cpu_upper_bound
    if ends is None:
        return torch.ones(num_spec_decodes, dtype=torch.bool)
    verified = _spec_sequence_masks_cpu(builder, m, num_decode_draft_tokens_cpu)
    query_lens = m.query_start_loc_cpu.diff()
    return near_boundary(
        ends[verified], query_lens[verified], builder.kv_cache_spec.block_size, builder.num_spec + 1
    )


def _spec_sequence_masks_cpu(
    builder: Any, m: Any, num_decode_draft_tokens_cpu: torch.Tensor
) -> torch.Tensor:
    """Return bool [requests]: the rows that this builder's build verifies."""
    query_lens = m.query_start_loc_cpu.diff()
    decodes = ~m.is_prefilling & (query_lens > 0)
    fits = query_lens <= builder.num_spec + 1
    return ((num_decode_draft_tokens_cpu >= 0) | decodes) & fits


def deferred_recoverssm_verify(
    self: Any,
    m: Any,
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    conv_weight: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """``KimiK3DeltaAttention._recoverssm_verify`` of a layer that defers.

    ``mixed_qkv`` [tokens, 3 * heads * head_dim] before the convolution; ``raw_g``
    [1, tokens, heads, head_dim]; ``raw_beta`` [1, tokens, heads]. Returns
    [1, tokens, heads, head_dim], in ``out`` if given. A step that does not defer runs the stock
    method.
    """
    deferred = getattr(m, "recoverssm_deferred", None)
    if deferred is None:
        inputs = (m, mixed_qkv, raw_g, raw_beta, conv_weight, query_start_loc, out)
        stock: torch.Tensor = type(self)._recoverssm_verify(self, *inputs)
        return stock
    context = deferred.context
    folds = None
    if context.fused:
        folds = deferred.plan(self)
    else:
        deferred.flush(self)
    conv_state, state = self.kv_cache[:2]
    state_indices = m.spec_state_indices_tensor[: m.num_spec_decodes, 0]
    activations = causal_conv1d_update(
        mixed_qkv,
        conv_state if is_conv_state_dim_first() else conv_state.transpose(-1, -2),
        conv_weight,
        self.conv1d.bias,
        activation="silu",
        conv_state_indices=state_indices,
        num_accepted_tokens=m.num_accepted_tokens,
        query_start_loc=query_start_loc,
        max_query_len=self.spec_query_len,
        validate_data=False,
        out=torch.empty_like(mixed_qkv),
    )
    q, k, v = (
        rearrange(part, "t (h d) -> 1 t h d", d=self.head_dim)
        for part in activations.split(self.local_projection_size, dim=-1)
    )
    records = self.recoverssm_records
    inputs = (q, k, v, raw_g, raw_beta, self.A_log, self.dt_bias, self.gate_lower_bound)
    rows = (query_start_loc, state_indices, self.spec_query_len)
    if folds is None:
        verified: torch.Tensor = kda_recoverssm_verify(
            *inputs, state, context.step_records, *rows, out
        )
        context.keep(records, state_indices.shape[0])
        return verified
    out = v.new_empty(v.shape) if out is None else out
    ledger = context.ledger
    return fold_verify(
        Window(*inputs, *rows),
        state,
        as_operands(records),
        ledger.write_rows,
        ledger.slots,
        folds,
        out,
        fix=FIX,
    )
