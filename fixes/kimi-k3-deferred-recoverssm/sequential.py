"""The fused verify in one kernel: a head's values walk the window token by token.

Less work before the first state is read than in ``chunk``, and more for each token: the faster of
the two where a launch has few heads of few requests.
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


@triton.jit
def _pending(
    key_gate_ptr,
    correction_ptr,
    due,
    offs_k,
    offs_v,
    stride_key_gate_token,
    stride_correction_token,
    dt_bias,
    a,
    lower_bound,
    K: tl.constexpr,
    BV: tl.constexpr,
    USE_LOWER_BOUND: tl.constexpr,
):
    """What ``due`` pending tokens do to a state: its decay [K], then what they add."""
    after = tl.full([K], 1.0, tl.float32)  # the decay that follows a token
    added = tl.zeros([1, BV, K], tl.float32)
    for back in range(due):
        t = due - 1 - back
        k = tl.load(key_gate_ptr + t * stride_key_gate_token + offs_k).to(tl.float32)
        g = tl.load(key_gate_ptr + t * stride_key_gate_token + K + offs_k).to(tl.float32)
        u = tl.load(correction_ptr + t * stride_correction_token + offs_v)
        added += u[None, :, None] * tl.reshape(unit(k) * after, (1, 1, K))
        after *= tl.exp(_kda_gate(g, dt_bias, a, lower_bound, USE_LOWER_BOUND))
    return after, added


@triton.jit(do_not_specialize=["scratch_row"])
def sequential_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    raw_g_ptr,
    raw_beta_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    correction_ptr,
    key_gate_ptr,
    out_ptr,
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
    stride_v,
    stride_g,
    stride_beta,
    stride_out,
    stride_state,
    stride_state_head,
    stride_state_v,
    stride_state_k,
    stride_correction,
    stride_correction_head,
    stride_correction_token,
    stride_key_gate,
    stride_key_gate_head,
    stride_key_gate_token,
    stride_state_indices,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    WINDOW: tl.constexpr,
    USE_LOWER_BOUND: tl.constexpr,
):
    """One head's block of ``BV`` values of one row: fold and write the checkpoint, verify.

    The tiles have a leading axis of size 1: without it Triton 3.6 moves every token's outputs to
    another layout, through shared memory.
    """
    block = tl.program_id(0)
    row = tl.program_id(1)
    head = tl.program_id(2)

    bos = tl.load(query_start_loc_ptr + row).to(tl.int64)
    length = tl.load(query_start_loc_ptr + row + 1) - bos
    state_index = tl.load(state_indices_ptr + row * stride_state_indices).to(tl.int64)
    offs_k = tl.arange(0, K)
    offs_v = block * BV + tl.arange(0, BV)

    if state_index <= null_block_id:  # a padded row
        for t in tl.static_range(WINDOW):
            out_ptrs = out_ptr + (bos + t) * stride_out + head * V + offs_v
            tl.store(out_ptrs, tl.zeros([BV], tl.float32), mask=(t < length) & (offs_v < V))
        return

    write_row = tl.load(write_rows_ptr + row).to(tl.int64)
    write_row = tl.where(write_row < 0, scratch_row, write_row)
    a = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head * K + offs_k).to(tl.float32)
    state_ptrs = state_ptr + state_index * stride_state + head * stride_state_head
    state_ptrs += offs_v[None, :, None] * stride_state_v + offs_k[None, None, :] * stride_state_k

    due = tl.load(fold_lens_ptr + row)
    read_row = tl.load(read_rows_ptr + row).to(tl.int64)
    old_kg = key_gate_ptr + read_row * stride_key_gate + head * stride_key_gate_head
    old_u = correction_ptr + read_row * stride_correction + head * stride_correction_head
    after, added = _pending(
        old_kg, old_u, due, offs_k, offs_v, stride_key_gate_token, stride_correction_token,
        dt_bias, a, lower_bound, K, BV, USE_LOWER_BOUND,
    )  # fmt: skip
    state = tl.load(state_ptrs).to(tl.float32)
    state = state * tl.reshape(after, (1, 1, K)) + added
    # What is verified is what the checkpoint holds, rounded to its type.
    stored = state.to(state_ptr.dtype.element_ty)
    tl.store(state_ptrs, stored, mask=due > 0)
    state = stored.to(tl.float32)

    new_kg = key_gate_ptr + write_row * stride_key_gate + head * stride_key_gate_head
    new_u = correction_ptr + write_row * stride_correction + head * stride_correction_head
    for t in tl.static_range(WINDOW):
        valid = t < length
        token = bos + t
        q = tl.load(q_ptr + token * stride_q + head * K + offs_k, mask=valid, other=0.0)
        k = tl.load(k_ptr + token * stride_k + head * K + offs_k, mask=valid, other=0.0)
        g = tl.load(raw_g_ptr + token * stride_g + head * K + offs_k, mask=valid, other=0.0)
        v = tl.load(v_ptr + token * stride_v + head * V + offs_v, mask=valid, other=0.0)
        beta = tl.load(raw_beta_ptr + token * stride_beta + head, mask=valid, other=0.0)
        q32 = q.to(tl.float32)
        q32 *= tl.rsqrt(tl.sum(q32 * q32) + 1e-6) * (K**-0.5)
        gate = _kda_gate(g.to(tl.float32), dt_bias, a, lower_bound, USE_LOWER_BOUND)
        query = tl.reshape(q32, (1, 1, K))
        key = tl.reshape(unit(k.to(tl.float32)), (1, 1, K))

        state *= tl.reshape(tl.exp(gate), (1, 1, K))
        u = v.to(tl.float32) - tl.sum(tl.sum(state * key, axis=0), axis=1)
        u *= tl.sigmoid(beta.to(tl.float32))
        state += u[None, :, None] * key
        out = tl.sum(tl.sum(state * query, axis=0), axis=1)

        tl.store(out_ptr + token * stride_out + head * V + offs_v, out, mask=valid & (offs_v < V))
        tl.store(new_u + t * stride_correction_token + offs_v, u, mask=valid & (offs_v < V))
        if block == 0:
            tl.store(new_kg + t * stride_key_gate_token + offs_k, k, mask=valid & (offs_k < K))
            tl.store(new_kg + t * stride_key_gate_token + K + offs_k, g, mask=valid & (offs_k < K))


def verify_sequential(
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
    """``verify.verify_window`` by this kernel, its operands checked."""
    _, _, heads, key_dim = q.shape
    value_dim, rows = v.shape[-1], state_indices.shape[0]
    correction, key_gate = records.correction, records.key_gate
    sequential_kernel[(value_dim // BLOCK_V, rows, heads)](
        q,
        k,
        v,
        raw_g,
        raw_beta,
        A_log,
        dt_bias,
        checkpoint_state,
        correction,
        key_gate,
        out,
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
        v.stride(1),
        raw_g.stride(1),
        raw_beta.stride(1),
        out.stride(1),
        *checkpoint_state.stride(),
        *correction.stride()[:3],
        *key_gate.stride()[:3],
        state_indices.stride(0),
        K=key_dim,
        V=value_dim,
        BV=BLOCK_V,
        WINDOW=spec_query_len,
        USE_LOWER_BOUND=lower_bound is not None,
        num_warps=1,
    )
    return out
