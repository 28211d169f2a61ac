"""Records by slot, the commit that defers, and the step's handle on both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.models.kimi_k3.nvidia.ops.recoverssm import (
    KDARecoverSSMCommitContext,
    KDARecoverSSMRecords,
    _commit_kda_state_kernel,
    _compact_conv_state_kernel,
    _prepare_commit_plan_kernel,
)
from vllm.triton_utils import triton
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from vllm_overlay.kda.folds import Commits, Ledger
from vllm_overlay.kda.operands import Folds, Records

FP32_DEFERRED = "fp32_deferred"


def allocate_records(
    rows: int,
    heads: int,
    window: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    halves: int = 2,
) -> KDARecoverSSMRecords:
    """Allocate ``halves`` x (``rows`` slots and a scratch row) of verify records.

    ``correction`` [halves * (rows + 1), heads, window, head_dim] float32, ``key_gate`` the same
    with 2 * head_dim in ``dtype``. Two halves for the fused verify, which reads a request's
    pending tokens while it writes the next ones.
    """
    records: KDARecoverSSMRecords = KDARecoverSSMRecords.allocate(
        halves * (rows + 1), heads, window, head_dim, dtype, device
    )
    return records


def as_operands(records: KDARecoverSSMRecords) -> Records:
    """Return vLLM's records as the fused verify takes them: raw keys, and gates behind them."""
    keys, gates = records.key_gate.chunk(2, dim=-1)
    return Records(records.correction, keys, gates, unit=False)


@dataclass
class KDADeferredCommitContext(KDARecoverSSMCommitContext):
    """The commit of one KV-cache group's KDA layers that leaves the state to the next verify.

    It compacts the convolution states and stores each row's accepted tokens as pending; only eager
    rows' states are folded at once. Pending counts are shared by all groups; what a group has
    folded is its own: the ``ledger``.
    """

    ledger: Ledger = field(init=False)
    # With one half: what the stock verify writes, by verify row, for ``keep``.
    step_records: KDARecoverSSMRecords | None = field(default=None, init=False)
    align: bool = field(default=False, init=False)

    @classmethod
    def create(
        cls,
        layers: Sequence[Any],
        *,
        spec_query_len: int,
        max_num_reqs: int,
        backend: str = FP32_DEFERRED,
        align: bool = False,
    ) -> KDADeferredCommitContext:
        """Gather the addresses of ``layers``' caches and records; ``align``: the cache mode.

        Raises ValueError if the layers have no records by slot (``install_layers`` makes them).
        """
        rows = {layer.recoverssm_records.correction.shape[0] for layer in layers}
        halves, rest = divmod(rows.pop(), max_num_reqs + 1) if len(rows) == 1 else (0, 0)
        if rest or halves not in (1, 2):
            raise ValueError("deferred RecoverSSM: install_layers must come before the context")
        context: KDADeferredCommitContext = super().create(
            layers, spec_query_len=spec_query_len, max_num_reqs=max_num_reqs, backend=backend
        )
        device = context.commit_lens.device
        context.align = align
        context.ledger = Ledger.create(max_num_reqs, halves, device)
        if halves == 1:
            known = layers[0].recoverssm_records
            context.step_records = KDARecoverSSMRecords.allocate(
                max_num_reqs, *known.correction.shape[1:], known.key_gate.dtype, device
            )
        return context

    @property
    def fused(self) -> bool:
        """Whether the verify itself folds: the records then have two halves."""
        return self.ledger.halves == 2

    def keep(self, records: KDARecoverSSMRecords, rows: int) -> None:
        """File the step's records of ``rows`` verify rows in a layer's ``records``, by slot."""
        assert self.step_records is not None
        kept = self.ledger.write_rows[:rows].long()
        records.correction[kept] = self.step_records.correction[:rows]
        records.key_gate[kept] = self.step_records.key_gate[:rows]

    def commit(  # type: ignore[override]
        self,
        num_accepted_tokens: torch.Tensor,
        state_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        request_indices: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_computed_tokens: torch.Tensor | None = None,
        mamba_block_size: int | None = None,
        *,
        record_rows: torch.Tensor,
        pending: torch.Tensor,
        eager: torch.Tensor | None = None,
    ) -> None:
        """Keep the accepted tokens of a step: vLLM's commit, with the states left for later.

        The first seven are vLLM's. ``record_rows`` [rows] or longer holds each row's slot or -1;
        ``pending`` [slots] is set, also to 0; ``eager`` [rows] is not 0 where the state must be
        folded now, with its boundary state in align mode.
        """
        rows = state_indices.shape[0]
        if rows == 0:
            return
        if rows > self.ledger.slots or query_start_loc.shape[0] != rows + 1:
            raise ValueError("deferred RecoverSSM: the rows of the commit's metadata differ")
        if (block_table is not None) != self.align:
            raise ValueError("deferred RecoverSSM: the commit's cache mode is not the builder's")
        if mamba_block_size is not None and mamba_block_size < self.spec_query_len:
            raise ValueError("deferred RecoverSSM: a state block is shorter than a window")
        self._plan_commit(
            num_accepted_tokens,
            state_indices,
            query_start_loc,
            request_indices,
            block_table,
            num_computed_tokens,
            mamba_block_size,
        )
        self._compact_conv(state_indices)
        commits = Commits(
            self.commit_lens,
            state_indices,
            self.final_state_indices,
            self.boundary_state_indices,
            self.boundary_recovery_lens,
        )
        self.ledger.settle(record_rows, pending, commits, eager)
        if eager is not None:
            self.fold_due(self.ledger.due.finals)

    def _plan_commit(
        self,
        num_accepted: torch.Tensor,
        state_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        request_indices: torch.Tensor | None,
        block_table: torch.Tensor | None,
        num_computed: torch.Tensor | None,
        block_size: int | None,
    ) -> None:
        def stride(tensor: torch.Tensor | None, axis: int = 0) -> int:
            return 0 if tensor is None else tensor.stride(axis)

        _prepare_commit_plan_kernel[(state_indices.shape[0],)](
            num_accepted,
            request_indices,
            state_indices,
            query_start_loc,
            block_table,
            num_computed,
            self.commit_lens,
            self.final_state_indices,
            self.boundary_state_indices,
            self.boundary_recovery_lens,
            NULL_BLOCK_ID,
            block_size or 1,
            1 if block_table is None else block_table.shape[1],
            num_accepted.stride(0),
            stride(request_indices),
            state_indices.stride(0),
            query_start_loc.stride(0),
            stride(block_table),
            stride(block_table, 1),
            stride(num_computed),
            SPEC_QUERY_LEN=self.spec_query_len,
            num_warps=1,
        )

    def _compact_conv(self, state_indices: torch.Tensor) -> None:
        conv = self.conv_states[0]
        block_d = 256
        grid = (triton.cdiv(conv.shape[1], block_d), state_indices.shape[0], len(self.conv_states))
        _compact_conv_state_kernel[grid](
            conv,
            self.conv_state_base_addrs,
            self.conv_state_block_strides,
            self.conv_state_dim_strides,
            self.conv_state_token_strides,
            state_indices,
            self.commit_lens,
            self.final_state_indices,
            self.boundary_state_indices,
            self.boundary_recovery_lens,
            NULL_BLOCK_ID,
            conv.shape[1],
            self.conv_history_len,
            state_indices.stride(0),
            BLOCK_D=block_d,
            BLOCK_HISTORY=triton.next_power_of_2(self.conv_history_len),
            ALIGN_MODE=self.align,
            num_warps=4,
        )

    def fold_due(self, finals: torch.Tensor) -> None:
        """Fold the due record rows of every layer with vLLM's commit kernel, as it is.

        That kernel reads the records of its row: so a row is a record row here, and those with
        nothing due end at once. ``finals`` [record rows]: the state blocks written.
        """
        state, due = self.checkpoints[0], self.ledger.due
        correction, key_gate = self.correction_caches[0], self.kg_caches[0]
        _, heads, value_dim, key_dim = state.shape
        block_v = min(triton.next_power_of_2(value_dim), 32)
        grid = (
            triton.cdiv(value_dim, block_v),
            due.lens.shape[0],
            len(self.checkpoints) * heads,
        )
        _commit_kda_state_kernel[grid](
            state,
            self.state_base_addrs,
            self.state_block_strides,
            correction,
            self.correction_cache_base_addrs,
            self.correction_cache_block_strides,
            key_gate,
            self.kg_cache_base_addrs,
            self.kg_cache_block_strides,
            self.A_log,
            self.dt_bias,
            due.sources,
            due.lens,
            finals,
            due.boundaries,
            due.boundary_lens,
            self.lower_bound or 0.0,
            NULL_BLOCK_ID,
            *state.stride()[1:],
            *correction.stride()[1:],
            *key_gate.stride()[1:],
            *self.A_log.stride(),
            *self.dt_bias.stride(),
            due.sources.stride(0),
            K=key_dim,
            V=value_dim,
            BK=triton.next_power_of_2(key_dim),
            BV=block_v,
            NUM_HEADS=heads,
            USE_LOWER_BOUND=self.lower_bound is not None,
            ALIGN_MODE=self.align,
            num_warps=4,
            num_stages=2,
        )


@dataclass
class KDARecoverSSMDeferred:
    """What a step's verify and commit need to defer; in the metadata as ``recoverssm_deferred``.

    ``record_rows`` int32 [slots]: each verify row's slot, -1 where no request owns the row.
    ``pending`` int32 [slots]. ``eager`` int32 [rows] or None: rows to commit after sampling.
    ``state_indices`` int32 [rows]: the checkpoints.
    """

    record_rows: torch.Tensor
    pending: torch.Tensor
    eager: torch.Tensor | None
    context: KDADeferredCommitContext
    state_indices: torch.Tensor
    _first: object = field(default=None, init=False, repr=False)

    def flush(self, layer: object = None) -> None:
        """Fold every pending row into its checkpoint, all layers of the group, once a step.

        Each layer of a forward calls it; the one that came first does the work, so that a forward
        that is repeated or captured has it too. A fold is not idempotent: the device marks what
        it has folded. Leaves ``pending`` alone, which other groups still read.
        """
        if not self._first_of_forward(layer):
            return
        ledger = self.context.ledger
        ledger.plan(self.record_rows, self.pending, self.state_indices, by_record=True)
        self.context.fold_due(ledger.due.sources)

    def plan(self, layer: object) -> Folds:
        """Return what each row's verify has to fold itself: planned once a forward."""
        ledger = self.context.ledger
        if self._first_of_forward(layer):
            ledger.plan(self.record_rows, self.pending, self.state_indices, by_record=False)
        return ledger.folds

    def _first_of_forward(self, layer: object) -> bool:
        if self._first is None:
            self._first = layer
        return layer is None or layer is self._first
