# SPDX-License-Identifier: Apache-2.0
"""Verify and commit of GLM-5.3-Flash's KDA layers from one recurrent state a request.

The verify reads a request's checkpoint, writes the outputs of its window and records what each
token did to the state. Once the runner knows how many tokens were accepted, the commit applies
exactly those to the checkpoint: one launch for all layers of all KV-cache groups. Source: the
RecoverSSM fix of the public GLM-5.3-Flash recipes, and vLLM's `fused_recurrent_kda`, whose results
these kernels give bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.models.glm5next.common.recoverssm_kernels import (
    compact_conv_kernel,
    fold_kernel,
    plan_kernel,
    verify_kernel,
)
from vllm.models.glm5next.nvidia.ops.third_party.kda.fused_recurrent import token_stride
from vllm.triton_utils import triton

# Value rows a program, as `bench.glm5next_recoverssm --sweep` chose them on an H200. The verify has
# one warp, as the stock kernel: more would add up a row's keys in another order.
_VERIFY_ROWS = 16
_FOLD_ROWS, _FOLD_WARPS = 32, 1
_CONV_CHANNELS = 256


@dataclass(frozen=True)
class Records:
    """What one layer's verified tokens did to the state, for ``rows`` rows of ``q`` tokens.

    ``data``: fp32 [rows * q, 3, heads, head size]: unit keys, decays, corrections. It lives from a
    step's verify to its commit and belongs to no KV-cache block.
    """

    data: torch.Tensor
    rows: int
    q: int


def allocate_records(
    num_rows: int,
    num_heads: int,
    head_dim: int,
    spec_query_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Records:
    """Return a layer's records: ``12 * num_rows * spec_query_len * num_heads * head_dim`` bytes.

    Raises ValueError for a ``dtype`` other than fp32: a rounded record is another state.
    """
    if dtype != torch.float32:
        raise ValueError(f"RecoverSSM: records are kept in float32, not in {dtype}")
    shape = (num_rows * spec_query_len, 3, num_heads, head_dim)
    return Records(torch.empty(shape, dtype=dtype, device=device), num_rows, spec_query_len)


def kda_recoverssm_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    g_bias: torch.Tensor,
    lower_bound: float,
    checkpoint_state: torch.Tensor,
    records: Records,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the outputs of each row's window, from its checkpoint, which is only read.

    ``q``, ``k``, ``v`` [1, tokens, heads, D] and ``beta`` [1, tokens, heads] may be columns of a
    wider buffer; ``g`` [1, tokens, heads, D] are raw gate logits, ``beta`` raw logits.
    ``checkpoint_state`` [blocks, heads, D, D]; ``state_indices`` int32 [rows], each row's block (0:
    the row is left alone); ``query_start_loc`` int32 [rows + 1]. Row i fills the records of row i.
    A row may not be longer than ``records.q``: the metadata builder sends such rows elsewhere.

    Raises ValueError if shapes do not fit.
    """
    heads, head_dim = k.shape[2:]
    rows = state_indices.shape[0]
    if query_start_loc.shape[0] != rows + 1:
        raise ValueError("RecoverSSM: start locations and blocks are not of the same rows")
    if rows > records.rows:
        raise ValueError("RecoverSSM: more rows verify than there are records for")
    if records.data.shape[1:] != (3, heads, head_dim) or v.shape != k.shape:
        raise ValueError("RecoverSSM: the records have other heads than the layer")
    if checkpoint_state.stride()[1:] != (head_dim * head_dim, head_dim, 1):
        raise ValueError("RecoverSSM: a block's state must lie in one piece")
    if out is None:
        out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    elif out.shape != k.shape or not out.is_contiguous():
        raise ValueError("RecoverSSM: the output must be contiguous and shaped as the keys")
    if rows == 0 or k.shape[1] == 0:
        return out
    tile = min(_VERIFY_ROWS, head_dim)
    verify_kernel[(rows * heads * (head_dim // tile),)](
        q,
        k,
        v,
        g.contiguous(),
        beta,
        out,
        checkpoint_state,
        records.data,
        query_start_loc,
        state_indices,
        a_log.reshape(-1),
        g_bias.reshape(-1),
        head_dim**-0.5,
        token_stride(q),
        token_stride(k),
        token_stride(v),
        token_stride(beta),
        state_indices.stride(0),
        STRIDE_STATE=checkpoint_state.stride(0),
        H=heads,
        K=head_dim,
        V=head_dim,
        Q=records.q,
        BV=tile,
        LOWER_BOUND=lower_bound,
        num_warps=1,
    )
    return out


@dataclass(frozen=True)
class Glm5NextRecoverSSMCommitContext:
    """What the commit of one KV-cache group's layers needs, as long as their caches stay.

    ``plan``: int32 [requests, 5], see the kernels. ``caches`` are the layers' (convolution, state)
    pairs as they were bound, the convolution as [blocks, channels, columns].
    """

    caches: tuple[Any, ...]
    conv_states: tuple[torch.Tensor, ...]
    states: tuple[torch.Tensor, ...]
    records: tuple[Records, ...]
    spec_query_len: int
    plan: torch.Tensor

    @classmethod
    def create(
        cls, layers: Sequence[Any], *, spec_query_len: int, max_num_reqs: int
    ) -> "Glm5NextRecoverSSMCommitContext":
        """``layers``: KDA layers with ``kv_cache`` (convolution, state) and ``recoverssm_records``.

        Raises ValueError if they are none, or differ in a way that one launch cannot serve.
        """
        if not layers:
            raise ValueError("RecoverSSM: a group without a layer has nothing to commit")
        caches = tuple(layer.kv_cache for layer in layers)
        convs = tuple(conv for conv, _ in caches)
        if not is_conv_state_dim_first():
            convs = tuple(conv.transpose(-1, -2) for conv in convs)
        states = tuple(state for _, state in caches)
        records = tuple(layer.recoverssm_records for layer in layers)
        _check_alike("state", states)
        _check_alike("convolution state", convs)
        _check_alike("records", tuple(record.data for record in records))
        _, heads, value_dim, key_dim = states[0].shape
        if states[0].stride()[1:] != (value_dim * key_dim, key_dim, 1):
            raise ValueError("RecoverSSM: a block's state must lie in one piece")
        if any(record.q != spec_query_len for record in records):
            raise ValueError("RecoverSSM: the records have another window than the model")
        if any(record.rows < max_num_reqs for record in records):
            raise ValueError("RecoverSSM: fewer records than max_num_seqs")
        if records[0].data.shape[1:] != (3, heads, key_dim):
            raise ValueError("RecoverSSM: the records have other heads than the state")
        if convs[0].shape[2] < spec_query_len:
            raise ValueError("RecoverSSM: the convolution state has no room for a window")
        plan = torch.zeros((max_num_reqs, 5), dtype=torch.int32, device=states[0].device)
        return cls(caches, convs, states, records, spec_query_len, plan)

    @cached_property
    def table(self) -> "CommitTable":
        """The table of this group alone."""
        return CommitTable.create([self])

    def prepare(self, num_accepted_tokens: torch.Tensor, rows: "CommitRows") -> None:
        """Write this group's plan alone; see ``plan_commits``."""
        plan_commits([self], num_accepted_tokens, [rows])

    def commit(
        self,
        num_accepted_tokens: torch.Tensor,
        state_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        request_indices: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_computed_tokens: torch.Tensor | None = None,
        mamba_block_size: int | None = None,
    ) -> None:
        """Fold each row's accepted tokens into this group's convolution and recurrent states.

        ``num_accepted_tokens`` counts per batch row (the runner's ``num_sampled``); the rest are
        the parts of ``CommitRows``. Raises ValueError if they do not fit together.
        """
        align = (block_table, num_computed_tokens, mamba_block_size)
        rows = CommitRows(state_indices, query_start_loc, request_indices, *align)
        self.prepare(num_accepted_tokens, rows)
        self.table.apply(state_indices.shape[0])


@dataclass(frozen=True)
class CommitRows:
    """The rows of one group that a step verified, for its commit.

    ``state_indices`` int32 [rows]: the blocks that the verify read; ``query_start_loc`` int32
    [rows + 1]; ``request_indices`` int32 [rows] maps verified rows to batch rows where they differ.
    In align mode ``block_table`` int32 [batch, columns], ``num_computed_tokens`` [batch] before the
    step and ``mamba_block_size`` tokens say which block takes the state, and which one the state at
    a block's end.
    """

    state_indices: torch.Tensor
    query_start_loc: torch.Tensor
    request_indices: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    num_computed_tokens: torch.Tensor | None = None
    mamba_block_size: int | None = None


def plan_commits(
    contexts: Sequence[Glm5NextRecoverSSMCommitContext],
    num_accepted_tokens: torch.Tensor,
    rows: Sequence[CommitRows],
) -> None:
    """Write a step's plans, in one launch: what each group commits, from which block to which.

    ``num_accepted_tokens`` counts per batch row; ``rows`` of each group differ in their blocks
    only. Raises ValueError if parts do not fit together.
    """
    first, window = rows[0], contexts[0].spec_query_len
    count = first.state_indices.shape[0]
    alike = {(each.state_indices.shape[0], each.mamba_block_size) for each in rows}
    windows = {context.spec_query_len for context in contexts}
    if len(contexts) != len(rows) or len(alike) > 1 or len(windows) > 1:
        raise ValueError("RecoverSSM: the groups of a step differ in rows, block size or window")
    if any(count > context.plan.shape[0] for context in contexts):
        raise ValueError("RecoverSSM: more rows to commit than the plan has")
    if first.query_start_loc.shape[0] != count + 1:
        raise ValueError("RecoverSSM: start locations and state blocks are not of the same rows")
    computed, block = first.num_computed_tokens, first.mamba_block_size
    found = [each.block_table for each in rows]
    if len({part is None for part in (*found, computed, block)}) > 1:
        raise ValueError("RecoverSSM: align mode wants table, token counts and block size")
    if block is not None and block < window:
        raise ValueError("RecoverSSM: a mamba block must hold a whole window")
    tables = tuple(table for table in found if table is not None)
    plan_kernel[(count,)](
        num_accepted_tokens,
        first.request_indices,
        first.query_start_loc,
        computed,
        tuple(each.state_indices for each in rows),
        tables or None,
        tuple(context.plan for context in contexts),
        block or 1,
        min(table.shape[1] for table in tables) if tables else 1,
        num_accepted_tokens.stride(0),
        computed.stride(0) if computed is not None else 0,
        tuple(each.state_indices.stride(0) for each in rows),
        tuple(table.stride(0) for table in tables) or None,
        tuple(table.stride(1) for table in tables) or None,
        GROUPS=len(rows),
        Q=window,
        num_warps=1,
    )


def _check_alike(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless all have one shape (but for blocks), layout and dtype."""
    first = tensors[0]
    for other in tensors[1:]:
        if (other.shape[1:], other.stride(), other.dtype, other.device) != (
            first.shape[1:],
            first.stride(),
            first.dtype,
            first.device,
        ):
            raise ValueError(f"RecoverSSM: the layers differ in their {what}")


@dataclass(frozen=True)
class CommitTable:
    """Where one launch finds the layers of several KV-cache groups.

    ``layers``: int64 [layers, 4], offsets in elements of each layer's state, convolution, records
    and plan from the first layer's. ``alignment``: a power of two, at most 16, that divides them.
    """

    contexts: tuple[Glm5NextRecoverSSMCommitContext, ...]
    layers: torch.Tensor
    alignment: int

    @classmethod
    def create(cls, contexts: Sequence[Glm5NextRecoverSSMCommitContext]) -> "CommitTable":
        """Raises ValueError if the groups' layers differ in shape, layout or dtype."""
        first = contexts[0]
        states = [state for context in contexts for state in context.states]
        convs = [conv for context in contexts for conv in context.conv_states]
        records = [record.data for context in contexts for record in context.records]
        plans = [context.plan for context in contexts for _ in context.states]
        _check_alike("state", states)
        _check_alike("convolution state", convs)
        _check_alike("records", records)
        columns = [_offsets(part) for part in (states, convs, records, plans)]
        reached = (offset for column in columns[:3] for offset in column)
        alignment = gcd(16, states[0].stride(0), convs[0].stride(0), *reached)
        layers = torch.tensor(columns, dtype=torch.int64).T.contiguous()
        return cls(tuple(contexts), layers.to(first.plan.device), alignment)

    def apply(self, rows: int) -> None:
        """Do what the contexts' plans say for their first ``rows`` rows, in two launches."""
        self.compact(rows)
        self.fold(rows)

    def compact(self, rows: int) -> None:
        """Move each committed row's convolution window to column 0 of its block."""
        first = self.contexts[0]
        conv = first.conv_states[0]
        history = conv.shape[2] - first.spec_query_len + 1
        tiles = triton.cdiv(conv.shape[1], _CONV_CHANNELS)
        compact_conv_kernel[(tiles, rows, self.layers.shape[0])](
            conv,
            first.plan,
            self.layers,
            conv.shape[1],
            *conv.stride(),
            HISTORY=history,
            BLOCK_H=triton.next_power_of_2(history),
            BLOCK_C=_CONV_CHANNELS,
            ALIGNMENT=self.alignment,
            num_warps=4,
        )

    def fold(self, rows: int, which: torch.Tensor | None = None) -> None:
        """Apply each committed row's records to its recurrent state.

        ``which`` int32 [rows]: the rows of plan and records, if not the first ``rows``.
        """
        first = self.contexts[0]
        state, records = first.states[0], first.records[0].data
        _, heads, value_dim, key_dim = state.shape
        tile = min(_FOLD_ROWS, value_dim)
        fold_kernel[(heads * (value_dim // tile), rows, self.layers.shape[0])](
            state,
            records,
            first.plan,
            self.layers,
            which,
            STRIDE_STATE=state.stride(0),
            H=heads,
            K=key_dim,
            V=value_dim,
            Q=first.spec_query_len,
            BV=tile,
            ALIGNMENT=self.alignment,
            num_warps=_FOLD_WARPS,
        )


def _offsets(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return each tensor's distance from the first, in elements.

    Raises ValueError where it is no whole number of them.
    """
    size = tensors[0].element_size()
    distances = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors]
    if any(distance % size for distance in distances):
        raise ValueError("RecoverSSM: a layer lies at an address that no offset reaches")
    return [distance // size for distance in distances]
