"""The verify that folds: its operands are checked here, and the kernel is chosen by size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.models.kimi_k3.nvidia.ops.recoverssm import KDARecoverSSMRecords
from vllm.models.kimi_k3.nvidia.specialized_decode.recoverssm.chunk import verify_chunk
from vllm.models.kimi_k3.nvidia.specialized_decode.recoverssm.kernels import BLOCK_V, Folds
from vllm.models.kimi_k3.nvidia.specialized_decode.recoverssm.sequential import verify_sequential

# Rows x heads from which the chunk kernels are the faster (bench/kda_deferred.py, H200): measured
# so at 12 x 64; at 12 x 8 and 64 x 8 the sequential kernel is.
CHUNK_FROM = 768


def kernel_for(rows: int, heads: int) -> Callable[..., torch.Tensor]:
    """Return the faster verify of a launch's ``rows`` (a captured graph's padding included)."""
    return verify_chunk if rows * heads >= CHUNK_FROM else verify_sequential


def verify_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    checkpoint_state: torch.Tensor,
    records: KDARecoverSSMRecords,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    spec_query_len: int,
    record_indices: torch.Tensor,
    scratch_row: int,
    folds: Folds,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Verify each row's window from its checkpoint; return ``out`` [1, tokens, heads, V].

    vLLM's ``kda_recoverssm_verify`` with two changes. Row b writes its records to record row
    ``record_indices[b]``, or to ``scratch_row`` if that is negative. And it folds its pending
    tokens (``folds``) into the checkpoint first, and writes that back.

    ``q``, ``k``, ``raw_g`` [1, tokens, heads, K] and ``v`` [1, tokens, heads, V] with contiguous
    heads, ``raw_beta`` [1, tokens, heads], ``A_log`` [heads], ``dt_bias`` [heads * K],
    ``checkpoint_state`` [blocks, heads, V, K] float32 or bfloat16, ``query_start_loc`` [rows + 1],
    ``state_indices`` and ``record_indices`` [rows]. K is a power of two.

    Raises ValueError for shapes or strides that the kernel cannot take.
    """
    _, tokens, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    rows = state_indices.shape[0]
    if key_dim & (key_dim - 1) or value_dim % BLOCK_V:
        raise ValueError(f"deferred RecoverSSM: head sizes {key_dim} and {value_dim} do not fit")
    if checkpoint_state.shape[1:] != (heads, value_dim, key_dim):
        raise ValueError("deferred RecoverSSM: the checkpoint has other heads than the query")
    if any(x.stride()[2:] != (x.shape[3], 1) for x in (q, k, v, raw_g)) or raw_beta.stride(2) != 1:
        raise ValueError("deferred RecoverSSM: the heads of a token must be contiguous")
    if query_start_loc.shape[0] != rows + 1 or record_indices.shape[0] < rows:
        raise ValueError("deferred RecoverSSM: the rows of the metadata differ")
    if tokens > rows * spec_query_len:
        raise ValueError("deferred RecoverSSM: more tokens than the windows hold")
    if out is None:
        out = torch.empty_like(v)
    if out.shape != v.shape or out.stride()[2:] != (value_dim, 1):
        raise ValueError("deferred RecoverSSM: the output's heads must be contiguous")
    if tokens == 0:
        return out
    verify = kernel_for(rows, heads)
    return verify(
        q,
        k,
        v,
        raw_g,
        raw_beta,
        A_log,
        dt_bias,
        lower_bound,
        checkpoint_state,
        records,
        query_start_loc,
        state_indices,
        spec_query_len,
        record_indices,
        scratch_row,
        folds,
        out,
    )
