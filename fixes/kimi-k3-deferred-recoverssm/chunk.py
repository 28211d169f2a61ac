"""The fused verify as two kernels: what a window's tokens do to each other, then the state.

For a window of tokens t with unit keys k, scaled queries q, decays d, D_t = d_1 ... d_t, a head's
corrections and outputs follow from the state S before the window by

    u_t = beta_t (v_t - S (D_t k_t) - sum_{s<t} u_s (k_s D_t/D_s . k_t))
    o_t = S (D_t q_t) + sum_{s<=t} u_s (k_s D_t/D_s . q_t)

The first kernel computes the vectors D_t k_t and D_t q_t and the products of keys, once a head; the
second reads the state once, folds what is pending, writes it, and solves for u row by row.
"""

from __future__ import annotations

import torch
from vllm.models.kimi_k3.nvidia.ops.recoverssm import KDARecoverSSMRecords, _kda_gate
from vllm.models.kimi_k3.nvidia.specialized_decode.recoverssm.kernels import (
    BLOCK_V,
    Folds,
    unit,
)
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID


@triton.jit(do_not_specialize=["scratch_row"])
def window_kernel(
    q_ptr,
    k_ptr,
    raw_g_ptr,
    a_log_ptr,
    dt_bias_ptr,
    vectors_ptr,
    products_ptr,
    folds_ptr,
    key_gate_ptr,
    query_start_loc_ptr,
    state_indices_ptr,
    write_rows_ptr,
    read_rows_ptr,
    fold_lens_ptr,
    lower_bound,
    null_block_id,
    scratch_row,
    stride_q,
    stride_k,
    stride_g,
    stride_key_gate,
    stride_key_gate_head,
    stride_key_gate_token,
    stride_state_indices,
    H: tl.constexpr,
    K: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    USE_LOWER_BOUND: tl.constexpr,
):
    """One head of one row: the window's vectors and products, the folds' keys; records the keys."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    bos = tl.load(query_start_loc_ptr + row).to(tl.int64)
    length = tl.load(query_start_loc_ptr + row + 1) - bos
    if tl.load(state_indices_ptr + row * stride_state_indices) <= null_block_id:
        return
    offs_k = tl.arange(0, K)
    offs_t = tl.arange(0, PADDED)
    a = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head * K + offs_k).to(tl.float32)
    before = tl.full([K], 1.0, tl.float32)
    carried = tl.zeros([PADDED, K], tl.float32)
    out = row.to(tl.int64) * H + head
    vectors = vectors_ptr + out * WINDOW * 2 * K
    products = products_ptr + out * WINDOW * 2 * PADDED
    folds = folds_ptr + out * (WINDOW + 1) * K
    write_row = tl.load(write_rows_ptr + row).to(tl.int64)
    write_row = tl.where(write_row < 0, scratch_row, write_row)
    new_kg = key_gate_ptr + write_row * stride_key_gate + head * stride_key_gate_head
    due = tl.load(fold_lens_ptr + row)
    read_row = tl.load(read_rows_ptr + row).to(tl.int64)
    old_kg = key_gate_ptr + read_row * stride_key_gate + head * stride_key_gate_head
    after = tl.full([K], 1.0, tl.float32)
    for back in range(due):
        t = due - 1 - back
        k = tl.load(old_kg + t * stride_key_gate_token + offs_k).to(tl.float32)
        g = tl.load(old_kg + t * stride_key_gate_token + K + offs_k).to(tl.float32)
        tl.store(folds + t * K + offs_k, unit(k) * after)
        after *= tl.exp(_kda_gate(g, dt_bias, a, lower_bound, USE_LOWER_BOUND))
    tl.store(folds + WINDOW * K + offs_k, after)
    for t in tl.static_range(WINDOW):
        valid = t < length
        token = bos + t
        q = tl.load(q_ptr + token * stride_q + head * K + offs_k, mask=valid, other=0.0)
        k = tl.load(k_ptr + token * stride_k + head * K + offs_k, mask=valid, other=0.0)
        g = tl.load(raw_g_ptr + token * stride_g + head * K + offs_k, mask=valid, other=0.0)
        query = q.to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query) + 1e-6) * (K**-0.5)
        key = unit(k.to(tl.float32))
        decay = tl.exp(_kda_gate(g.to(tl.float32), dt_bias, a, lower_bound, USE_LOWER_BOUND))
        before *= decay
        carried *= decay[None, :]
        by_key = tl.sum(carried * key[None, :], axis=1)
        carried = tl.where(offs_t[:, None] == t, key[None, :], carried)
        by_query = tl.sum(carried * query[None, :], axis=1)
        tl.store(vectors + t * 2 * K + offs_k, key * before)
        tl.store(vectors + t * 2 * K + K + offs_k, query * before)
        tl.store(products + t * 2 * PADDED + offs_t, by_key)
        tl.store(products + t * 2 * PADDED + PADDED + offs_t, by_query)
        tl.store(new_kg + t * stride_key_gate_token + offs_k, k, mask=valid & (offs_k < K))
        tl.store(new_kg + t * stride_key_gate_token + K + offs_k, g, mask=valid & (offs_k < K))


@triton.jit(do_not_specialize=["scratch_row"])
def solve_kernel(
    v_ptr,
    raw_beta_ptr,
    vectors_ptr,
    products_ptr,
    folds_ptr,
    state_ptr,
    correction_ptr,
    out_ptr,
    query_start_loc_ptr,
    state_indices_ptr,
    write_rows_ptr,
    read_rows_ptr,
    fold_lens_ptr,
    null_block_id,
    scratch_row,
    stride_v,
    stride_beta,
    stride_out,
    stride_state,
    stride_state_head,
    stride_state_v,
    stride_state_k,
    stride_correction,
    stride_correction_head,
    stride_correction_token,
    stride_state_indices,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One head's block of ``BV`` values of one row: fold and write the checkpoint, solve."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    head = tl.program_id(2)
    bos = tl.load(query_start_loc_ptr + row).to(tl.int64)
    length = tl.load(query_start_loc_ptr + row + 1) - bos
    state_index = tl.load(state_indices_ptr + row * stride_state_indices).to(tl.int64)
    offs_k = tl.arange(0, K)
    offs_t = tl.arange(0, PADDED)
    offs_v = block * BV + tl.arange(0, BV)
    if state_index <= null_block_id:  # a padded row
        for t in tl.static_range(WINDOW):
            out_ptrs = out_ptr + (bos + t) * stride_out + head * V + offs_v
            tl.store(out_ptrs, tl.zeros([BV], tl.float32), mask=(t < length) & (offs_v < V))
        return
    write_row = tl.load(write_rows_ptr + row).to(tl.int64)
    write_row = tl.where(write_row < 0, scratch_row, write_row)
    state_ptrs = state_ptr + state_index * stride_state + head * stride_state_head
    state_ptrs += offs_v[:, None] * stride_state_v + offs_k[None, :] * stride_state_k
    due = tl.load(fold_lens_ptr + row)
    read_row = tl.load(read_rows_ptr + row).to(tl.int64)
    old_u = correction_ptr + read_row * stride_correction + head * stride_correction_head
    this = row.to(tl.int64) * H + head
    folds = folds_ptr + this * (WINDOW + 1) * K
    after = tl.load(folds + WINDOW * K + offs_k)[None, :]
    state = tl.load(state_ptrs).to(tl.float32) * after
    for t in range(due):
        old = tl.load(old_u + t * stride_correction_token + offs_v)
        state += old[:, None] * tl.load(folds + t * K + offs_k)[None, :]
    stored = state.to(state_ptr.dtype.element_ty)
    tl.store(state_ptrs, stored, mask=due > 0)
    state = stored.to(tl.float32)

    new_u = correction_ptr + write_row * stride_correction + head * stride_correction_head
    vectors = vectors_ptr + this * WINDOW * 2 * K
    products = products_ptr + this * WINDOW * 2 * PADDED
    known = tl.zeros([PADDED, BV], tl.float32)
    for t in tl.static_range(WINDOW):
        valid = t < length
        token = bos + t
        v = tl.load(v_ptr + token * stride_v + head * V + offs_v, mask=valid, other=0.0)
        beta = tl.load(raw_beta_ptr + token * stride_beta + head, mask=valid, other=0.0)
        key = tl.load(vectors + t * 2 * K + offs_k)[None, :]
        query = tl.load(vectors + t * 2 * K + K + offs_k)[None, :]
        by_key = tl.load(products + t * 2 * PADDED + offs_t)
        by_query = tl.load(products + t * 2 * PADDED + PADDED + offs_t)
        u = v.to(tl.float32) - tl.sum(state * key, axis=1)
        u -= tl.sum(known * by_key[:, None], axis=0)
        u *= tl.sigmoid(beta.to(tl.float32))
        known = tl.where(offs_t[:, None] == t, u[None, :], known)
        out = tl.sum(state * query, axis=1)
        out += tl.sum(known * by_query[:, None], axis=0)
        tl.store(out_ptr + token * stride_out + head * V + offs_v, out, mask=valid & (offs_v < V))
        tl.store(new_u + t * stride_correction_token + offs_v, u, mask=valid & (offs_v < V))


def verify_chunk(
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
    out: torch.Tensor,
) -> torch.Tensor:
    """``verify.verify_window`` by these kernels, its operands checked."""
    _, _, heads, key_dim = q.shape
    value_dim, rows = v.shape[-1], state_indices.shape[0]
    padded = triton.next_power_of_2(spec_query_len)
    shape = (rows, heads, spec_query_len, 2)
    vectors = torch.empty((*shape, key_dim), dtype=torch.float32, device=q.device)
    products = torch.empty((*shape, padded), dtype=torch.float32, device=q.device)
    folded = torch.empty(
        (rows, heads, spec_query_len + 1, key_dim), dtype=torch.float32, device=q.device
    )
    correction, key_gate = records.correction, records.key_gate
    constants = {
        "H": heads,
        "K": key_dim,
        "WINDOW": spec_query_len,
        "PADDED": padded,
    }
    window_kernel[(rows, heads)](
        q,
        k,
        raw_g,
        A_log,
        dt_bias,
        vectors,
        products,
        folded,
        key_gate,
        query_start_loc,
        state_indices,
        record_indices,
        folds.rows,
        folds.lens,
        lower_bound or 0.0,
        NULL_BLOCK_ID,
        scratch_row,
        q.stride(1),
        k.stride(1),
        raw_g.stride(1),
        *key_gate.stride()[:3],
        state_indices.stride(0),
        **constants,
        USE_LOWER_BOUND=lower_bound is not None,
        num_warps=1,
    )
    solve_kernel[(value_dim // BLOCK_V, rows, heads)](
        v,
        raw_beta,
        vectors,
        products,
        folded,
        checkpoint_state,
        correction,
        out,
        query_start_loc,
        state_indices,
        record_indices,
        folds.rows,
        folds.lens,
        NULL_BLOCK_ID,
        scratch_row,
        v.stride(1),
        raw_beta.stride(1),
        out.stride(1),
        *checkpoint_state.stride(),
        *correction.stride()[:3],
        state_indices.stride(0),
        **constants,
        V=value_dim,
        BV=BLOCK_V,
        num_warps=1,
    )
    return out
