"""The fused verify in one kernel: a head's values walk the window token by token.

Less work before the first state is read than in ``chunk``, and more for each token: the faster of
the two where a launch has few heads of few requests.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_overlay.kda.operands import VALUES, Folds, Records, Window
from vllm_overlay.kda.terms import decay, record, recorded, unit, zero


@triton.jit
def _pending(
    keys_ptr,
    gates_ptr,
    corrections_ptr,
    due,
    stride_key_token,
    stride_correction_token,
    bias,
    rate,
    lower_bound,
    K: tl.constexpr,
    BV: tl.constexpr,
    UNIT: tl.constexpr,
):
    """What ``due`` pending tokens do to a state: its decay [K], then what they add."""
    after = tl.full([K], 1.0, tl.float32)  # the decay that follows a token
    added = tl.zeros([1, BV, K], tl.float32)
    for back in range(due):
        t = due - 1 - back
        at = t * stride_key_token
        key, step = recorded(keys_ptr + at, gates_ptr + at, bias, rate, lower_bound, UNIT)
        u = tl.load(corrections_ptr + t * stride_correction_token)
        added += u[None, :, None] * tl.reshape(key * after, (1, 1, K))
        after *= step
    return after, added


@triton.jit(do_not_specialize=["scratch_row"])
def sequential_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    state_ptr,
    corrections_ptr,
    keys_ptr,
    gates_ptr,
    out_ptr,
    start_loc_ptr,
    blocks_ptr,
    write_rows_ptr,
    read_rows_ptr,
    fold_lens_ptr,
    lower_bound,
    scratch_row,
    stride_q,
    stride_k,
    stride_v,
    stride_gate,
    stride_beta,
    stride_out,
    stride_state,
    stride_correction,
    stride_correction_head,
    stride_correction_token,
    stride_key,
    stride_key_head,
    stride_key_token,
    stride_blocks,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    WINDOW: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One head's block of ``BV`` values of one row: fold and write the checkpoint, verify.

    The tiles have a leading axis of size 1: without it Triton 3.6 moves every token's outputs to
    another layout, through shared memory.
    """
    block = tl.program_id(0)
    row = tl.program_id(1)
    head = tl.program_id(2)
    bos = tl.load(start_loc_ptr + row).to(tl.int64)
    length = tl.load(start_loc_ptr + row + 1) - bos
    state_block = tl.load(blocks_ptr + row * stride_blocks).to(tl.int64)
    offs_k = tl.arange(0, K)
    offs_v = block * BV + tl.arange(0, BV)
    in_keys = head * K + offs_k
    in_values = head * V + offs_v
    if state_block <= 0:  # a padded row
        zero(out_ptr + bos * stride_out + in_values, stride_out, length, BV, WINDOW)
        return

    rate = tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(bias_ptr + in_keys)
    due = tl.load(fold_lens_ptr + row)
    read_row = tl.load(read_rows_ptr + row).to(tl.int64)
    of_key = head * stride_key_head + offs_k
    of_correction = head * stride_correction_head + offs_v
    old_key = read_row * stride_key + of_key
    old_u = corrections_ptr + read_row * stride_correction + of_correction
    after, added = _pending(
        keys_ptr + old_key, gates_ptr + old_key, old_u, due, stride_key_token,
        stride_correction_token, bias, rate, lower_bound, K, BV, UNIT,
    )  # fmt: skip
    tile = in_values[None, :, None] * K + offs_k[None, None, :]
    state_ptrs = state_ptr + state_block * stride_state + tile
    state = tl.load(state_ptrs).to(tl.float32)
    state = state * tl.reshape(after, (1, 1, K)) + added
    # What is verified is what the checkpoint holds, rounded to its type.
    stored = state.to(state_ptr.dtype.element_ty)
    tl.store(state_ptrs, stored, mask=due > 0)
    state = stored.to(tl.float32)

    write_row = tl.load(write_rows_ptr + row).to(tl.int64)
    write_row = tl.where(write_row < 0, scratch_row, write_row)
    new_key = write_row * stride_key + of_key
    new_u = corrections_ptr + write_row * stride_correction + of_correction
    for t in tl.static_range(WINDOW):
        valid = t < length
        token = bos + t
        q = tl.load(q_ptr + token * stride_q + in_keys, mask=valid, other=0.0)
        k = tl.load(k_ptr + token * stride_k + in_keys, mask=valid, other=0.0)
        g = tl.load(gate_ptr + token * stride_gate + in_keys, mask=valid, other=0.0)
        v = tl.load(v_ptr + token * stride_v + in_values, mask=valid, other=0.0)
        beta = tl.load(beta_ptr + token * stride_beta + head, mask=valid, other=0.0)
        query = tl.reshape(unit(q.to(tl.float32), K**-0.5), (1, 1, K))
        unit_key = unit(k.to(tl.float32))
        key = tl.reshape(unit_key, (1, 1, K))
        step = decay(g.to(tl.float32), bias, rate, lower_bound)

        state *= tl.reshape(step, (1, 1, K))
        u = v.to(tl.float32) - tl.sum(tl.sum(state * key, axis=0), axis=1)
        u *= tl.sigmoid(beta.to(tl.float32))
        state += u[None, :, None] * key
        out = tl.sum(tl.sum(state * query, axis=0), axis=1)

        tl.store(out_ptr + token * stride_out + in_values, out, mask=valid)
        tl.store(new_u + t * stride_correction_token, u, mask=valid)
        if block == 0:
            at = new_key + t * stride_key_token
            record(keys_ptr + at, gates_ptr + at, k, g, unit_key, step, valid, UNIT)


def verify_sequential(
    window: Window,
    state: Tensor,
    records: Records,
    write_rows: Tensor,
    scratch_row: int,
    folds: Folds,
    out: Tensor,
) -> Tensor:
    """``verify.fold_verify`` by this kernel, its operands checked."""
    w = window
    sequential_kernel[(w.value_size // VALUES, w.rows, w.heads)](
        w.q,
        w.k,
        w.v,
        w.gate,
        w.beta,
        w.a_log,
        w.gate_bias,
        state,
        records.corrections,
        records.keys,
        records.gates,
        out,
        w.start_loc,
        w.blocks,
        write_rows,
        folds.rows,
        folds.lens,
        w.lower_bound,
        scratch_row,
        *(part.stride(1) for part in (w.q, w.k, w.v, w.gate, w.beta, out)),
        state.stride(0),
        *records.corrections.stride()[:3],
        *records.keys.stride()[:3],
        w.blocks.stride(0),
        K=w.key_size,
        V=w.value_size,
        BV=VALUES,
        WINDOW=w.size,
        UNIT=records.unit,
        num_warps=1,
    )
    return out
