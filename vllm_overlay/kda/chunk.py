"""The fused verify as two kernels: what a window's tokens do to each other, then the state.

For a window of tokens t with unit keys k, scaled queries q, decays d, D_t = d_1 ... d_t, a head's
corrections and outputs follow from the state S before the window by

    u_t = beta_t (v_t - S (D_t k_t) - sum_{s<t} u_s (k_s D_t/D_s . k_t))
    o_t = S (D_t q_t) + sum_{s<=t} u_s (k_s D_t/D_s . q_t)

The first kernel computes the vectors D_t k_t and D_t q_t and the products of keys, once a head; the
second reads the state once, folds what is pending, writes it, and solves for u row by row. No
quotient of decays is taken: D_t/D_s is the product of the decays between.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_overlay.kda.operands import VALUES, Folds, Records, Window
from vllm_overlay.kda.terms import decay, record, recorded, unit, zero


@triton.jit(do_not_specialize=["scratch_row"])
def window_kernel(
    q_ptr,
    k_ptr,
    gate_ptr,
    a_log_ptr,
    bias_ptr,
    vectors_ptr,
    products_ptr,
    folded_ptr,
    keys_ptr,
    gates_ptr,
    start_loc_ptr,
    blocks_ptr,
    write_rows_ptr,
    read_rows_ptr,
    fold_lens_ptr,
    lower_bound,
    scratch_row,
    stride_q,
    stride_k,
    stride_gate,
    stride_key,
    stride_key_head,
    stride_key_token,
    stride_blocks,
    H: tl.constexpr,
    K: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One head of one row: the window's vectors and products, the folds' keys; records the keys."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    bos = tl.load(start_loc_ptr + row).to(tl.int64)
    length = tl.load(start_loc_ptr + row + 1) - bos
    if tl.load(blocks_ptr + row * stride_blocks) <= 0:
        return
    offs_k = tl.arange(0, K)
    offs_t = tl.arange(0, PADDED)
    in_keys = head * K + offs_k
    rate = tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(bias_ptr + in_keys)
    this = row.to(tl.int64) * H + head
    vectors = vectors_ptr + this * WINDOW * 2 * K
    products = products_ptr + this * WINDOW * 2 * PADDED
    folded = folded_ptr + this * (WINDOW + 1) * K + offs_k

    due = tl.load(fold_lens_ptr + row)
    read_row = tl.load(read_rows_ptr + row).to(tl.int64)
    of_key = head * stride_key_head + offs_k
    after = tl.full([K], 1.0, tl.float32)
    for back in range(due):
        t = due - 1 - back
        at = read_row * stride_key + of_key + t * stride_key_token
        key, step = recorded(keys_ptr + at, gates_ptr + at, bias, rate, lower_bound, UNIT)
        tl.store(folded + t * K, key * after)
        after *= step
    tl.store(folded + WINDOW * K, after)

    write_row = tl.load(write_rows_ptr + row).to(tl.int64)
    write_row = tl.where(write_row < 0, scratch_row, write_row)
    new_key = write_row * stride_key + of_key
    before = tl.full([K], 1.0, tl.float32)
    carried = tl.zeros([PADDED, K], tl.float32)
    for t in tl.static_range(WINDOW):
        valid = t < length
        token = bos + t
        q = tl.load(q_ptr + token * stride_q + in_keys, mask=valid, other=0.0)
        k = tl.load(k_ptr + token * stride_k + in_keys, mask=valid, other=0.0)
        g = tl.load(gate_ptr + token * stride_gate + in_keys, mask=valid, other=0.0)
        query = unit(q.to(tl.float32), K**-0.5)
        key = unit(k.to(tl.float32))
        step = decay(g.to(tl.float32), bias, rate, lower_bound)
        before *= step
        carried *= step[None, :]
        by_key = tl.sum(carried * key[None, :], axis=1)
        carried = tl.where(offs_t[:, None] == t, key[None, :], carried)
        by_query = tl.sum(carried * query[None, :], axis=1)
        tl.store(vectors + t * 2 * K + offs_k, key * before)
        tl.store(vectors + t * 2 * K + K + offs_k, query * before)
        tl.store(products + t * 2 * PADDED + offs_t, by_key)
        tl.store(products + t * 2 * PADDED + PADDED + offs_t, by_query)
        at = new_key + t * stride_key_token
        record(keys_ptr + at, gates_ptr + at, k, g, key, step, valid, UNIT)


@triton.jit(do_not_specialize=["scratch_row"])
def solve_kernel(
    v_ptr,
    beta_ptr,
    vectors_ptr,
    products_ptr,
    folded_ptr,
    state_ptr,
    corrections_ptr,
    out_ptr,
    start_loc_ptr,
    blocks_ptr,
    write_rows_ptr,
    read_rows_ptr,
    fold_lens_ptr,
    scratch_row,
    stride_v,
    stride_beta,
    stride_out,
    stride_state,
    stride_correction,
    stride_correction_head,
    stride_correction_token,
    stride_blocks,
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
    bos = tl.load(start_loc_ptr + row).to(tl.int64)
    length = tl.load(start_loc_ptr + row + 1) - bos
    state_block = tl.load(blocks_ptr + row * stride_blocks).to(tl.int64)
    offs_k = tl.arange(0, K)
    offs_t = tl.arange(0, PADDED)
    offs_v = block * BV + tl.arange(0, BV)
    in_values = head * V + offs_v
    if state_block <= 0:  # a padded row
        zero(out_ptr + bos * stride_out + in_values, stride_out, length, BV, WINDOW)
        return

    this = row.to(tl.int64) * H + head
    folded = folded_ptr + this * (WINDOW + 1) * K + offs_k
    due = tl.load(fold_lens_ptr + row)
    read_row = tl.load(read_rows_ptr + row).to(tl.int64)
    of_correction = head * stride_correction_head + offs_v
    old_u = corrections_ptr + read_row * stride_correction + of_correction
    tile = in_values[:, None] * K + offs_k[None, :]
    state_ptrs = state_ptr + state_block * stride_state + tile
    after = tl.load(folded + WINDOW * K)[None, :]
    state = tl.load(state_ptrs).to(tl.float32) * after
    for t in range(due):
        old = tl.load(old_u + t * stride_correction_token)
        state += old[:, None] * tl.load(folded + t * K)[None, :]
    # What is verified is what the checkpoint holds, rounded to its type.
    stored = state.to(state_ptr.dtype.element_ty)
    tl.store(state_ptrs, stored, mask=due > 0)
    state = stored.to(tl.float32)

    write_row = tl.load(write_rows_ptr + row).to(tl.int64)
    write_row = tl.where(write_row < 0, scratch_row, write_row)
    new_u = corrections_ptr + write_row * stride_correction + of_correction
    vectors = vectors_ptr + this * WINDOW * 2 * K
    products = products_ptr + this * WINDOW * 2 * PADDED
    known = tl.zeros([PADDED, BV], tl.float32)
    for t in tl.static_range(WINDOW):
        valid = t < length
        token = bos + t
        v = tl.load(v_ptr + token * stride_v + in_values, mask=valid, other=0.0)
        beta = tl.load(beta_ptr + token * stride_beta + head, mask=valid, other=0.0)
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
        tl.store(out_ptr + token * stride_out + in_values, out, mask=valid)
        tl.store(new_u + t * stride_correction_token, u, mask=valid)


def verify_chunk(
    window: Window,
    state: Tensor,
    records: Records,
    write_rows: Tensor,
    scratch_row: int,
    folds: Folds,
    out: Tensor,
) -> Tensor:
    """``verify.fold_verify`` by these kernels, its operands checked."""
    w = window
    padded = triton.next_power_of_2(w.size)

    def scratch(*shape: int) -> Tensor:
        return torch.empty((w.rows, w.heads, *shape), dtype=torch.float32, device=w.q.device)

    vectors = scratch(w.size, 2, w.key_size)
    products = scratch(w.size, 2, padded)
    folded = scratch(w.size + 1, w.key_size)  # the folds' keys, then the state's decay
    rows = (w.start_loc, w.blocks, write_rows, folds.rows, folds.lens)
    constants = {"H": w.heads, "K": w.key_size, "WINDOW": w.size, "PADDED": padded, "num_warps": 1}
    window_kernel[(w.rows, w.heads)](
        w.q,
        w.k,
        w.gate,
        w.a_log,
        w.gate_bias,
        vectors,
        products,
        folded,
        records.keys,
        records.gates,
        *rows,
        w.lower_bound,
        scratch_row,
        *(part.stride(1) for part in (w.q, w.k, w.gate)),
        *records.keys.stride()[:3],
        w.blocks.stride(0),
        UNIT=records.unit,
        **constants,
    )
    solve_kernel[(w.value_size // VALUES, w.rows, w.heads)](
        w.v,
        w.beta,
        vectors,
        products,
        folded,
        state,
        records.corrections,
        out,
        *rows,
        scratch_row,
        *(part.stride(1) for part in (w.v, w.beta, out)),
        state.stride(0),
        *records.corrections.stride()[:3],
        w.blocks.stride(0),
        V=w.value_size,
        BV=VALUES,
        **constants,
    )
    return out
