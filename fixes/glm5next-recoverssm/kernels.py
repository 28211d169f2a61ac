# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of GLM-5.3-Flash's RecoverSSM: verify, commit plan, convolution, fold.

The verify does the arithmetic of vLLM's `fused_recurrent_kda` token by token and in its order, and
records what each token did to the state, in fp32: its unit key, its decay and its correction. So
the fold needs no sum over a dimension, only one product and one fused multiply-add an element: it
has no order of summation that a layout could change, and stores what the stock kernel would have
stored, bit for bit, whatever its tile and however it finds its addresses.

A record is fp32 [3, heads, K]: unit keys, decays, corrections. A plan row is int32 [5]: tokens to
commit, source block, final block, boundary block, tokens up to the boundary.
"""

from vllm.third_party.flash_linear_attention.ops.op import exp
from vllm.triton_utils import tl, triton


@triton.jit
def _unit(x):
    return x / tl.sqrt(tl.sum(x * x) + 1e-6)


@triton.jit
def verify_kernel(
    q_ptr,  # [tokens, heads, K]
    k_ptr,
    v_ptr,
    gate_ptr,  # raw logits [tokens, heads, K], contiguous
    beta_ptr,  # raw logits [tokens, heads]
    out_ptr,  # [tokens, heads, V], contiguous
    state_ptr,  # [blocks, heads, V, K]
    record_ptr,  # [rows * Q, 3, heads, K]
    start_loc_ptr,  # int32 [rows + 1]
    block_ptr,  # int32 [rows]
    a_log_ptr,  # [heads]
    gate_bias_ptr,  # [heads, K]
    scale,
    stride_q,
    stride_k,
    stride_v,
    stride_beta,
    stride_block,
    STRIDE_STATE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q: tl.constexpr,
    BV: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
):
    NV: tl.constexpr = V // BV
    pid = tl.program_id(0).to(tl.int64)
    part = pid % NV
    head = (pid // NV) % H
    row = pid // (NV * H)
    first = tl.load(start_loc_ptr + row).to(tl.int64)
    length = tl.load(start_loc_ptr + row + 1).to(tl.int64) - first
    if length == 0:
        return
    block = tl.load(block_ptr + row * stride_block).to(tl.int64)
    if block <= 0:  # the null block: a row that pads a CUDA graph
        return

    keys = head * K + tl.arange(0, K)
    values = head * V + part * BV + tl.arange(0, BV)
    amplitude = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    bias = tl.load(gate_bias_ptr + keys).to(tl.float32)
    tile = values[:, None] * K + tl.arange(0, K)[None, :]
    state = tl.load(state_ptr + block * STRIDE_STATE + tile).to(tl.float32)
    # Walked as pointers, as the stock kernel does: addresses computed anew in the loop would share
    # a layout with the records, and where a token's stride is no multiple of 16 the keys' norm
    # would be summed in another order.
    q_ptr += first * stride_q + keys
    k_ptr += first * stride_k + keys
    v_ptr += first * stride_v + values
    gate_ptr += first * (H * K) + keys
    beta_ptr += first * stride_beta + head
    out_ptr += first * (H * V) + values
    record_ptr += row * (Q * 3 * H * K)

    for _ in range(length):
        query = _unit(tl.load(q_ptr).to(tl.float32)) * scale
        key = _unit(tl.load(k_ptr).to(tl.float32))
        value = tl.load(v_ptr).to(tl.float32)
        logit = tl.load(gate_ptr).to(tl.float32) + bias
        decay = exp(LOWER_BOUND / (1.0 + tl.exp(-(amplitude * logit))))
        beta = tl.sigmoid(tl.load(beta_ptr).to(tl.float32))

        state *= decay[None, :]
        correction = (value - tl.sum(state * key[None, :], 1)) * beta
        state += correction[:, None] * key[None, :]
        out = tl.sum(state * query[None, :], 1)
        tl.store(out_ptr, out.to(out_ptr.dtype.element_ty))
        tl.store(record_ptr + 2 * H * K + values, correction)
        if part == 0:  # the same for all value tiles of the head
            tl.store(record_ptr + keys, key)
            tl.store(record_ptr + H * K + keys, decay)

        q_ptr += stride_q
        k_ptr += stride_k
        v_ptr += stride_v
        gate_ptr += H * K
        beta_ptr += stride_beta
        out_ptr += H * V
        record_ptr += 3 * H * K


@triton.jit
def plan_kernel(
    accepted_ptr,  # [batch]
    request_ptr,  # int32 [rows]: batch row of each verified row; None: the same
    start_loc_ptr,  # int32 [rows + 1]
    computed_ptr,  # tokens before this step [batch]; None outside align mode
    block_ptrs,  # a group each: int32 [rows]
    table_ptrs,  # a group each: int32 [batch, width]; None outside align mode
    plan_ptrs,  # a group each: int32 [rows, 5]
    block_size,
    table_width,
    stride_accepted,
    stride_computed,
    strides_block,
    strides_table_row,
    strides_table_col,
    GROUPS: tl.constexpr,
    Q: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = row
    if request_ptr is not None:
        request = tl.load(request_ptr + row).to(tl.int64)
    window = tl.load(start_loc_ptr + row + 1) - tl.load(start_loc_ptr + row)
    accepted = tl.load(accepted_ptr + request * stride_accepted).to(tl.int32)
    accepted = tl.minimum(tl.minimum(tl.maximum(accepted, 0), window), Q)
    if table_ptrs is not None:
        # The state goes to the block of the last committed token. Where that token fills its
        # block, the next one may not be allocated yet, and the final block is the boundary's.
        computed = tl.load(computed_ptr + request * stride_computed).to(tl.int32)
        column = tl.maximum(computed + accepted - 1, 0) // block_size
        column = tl.minimum(column, table_width - 1)
        filled = computed // block_size  # the block that this step may fill
        boundary_len = (filled + 1) * block_size - computed
        crossed = boundary_len < accepted

    for group in tl.static_range(GROUPS):
        source = tl.load(block_ptrs[group] + row * strides_block[group])
        plan = plan_ptrs[group] + row * 5
        if table_ptrs is not None:
            table = table_ptrs[group] + request * strides_table_row[group]
            final = tl.load(table + column * strides_table_col[group])
            boundary = tl.load(table + filled * strides_table_col[group], mask=crossed, other=0)
            tl.store(plan + 3, boundary)
            tl.store(plan + 4, boundary_len)
        else:
            final = source
            tl.store(plan + 3, 0)
            tl.store(plan + 4, 0)
        tl.store(plan, tl.where((source > 0) & (final > 0), accepted, 0))
        tl.store(plan + 1, source)
        tl.store(plan + 2, final)


@triton.jit
def compact_conv_kernel(
    conv_ref,  # [blocks, channels, columns], the first layer's
    plan_ref,
    layer_ptr,  # int64 [layers, 4]: offsets of state, convolution, records and plan
    channels,
    stride_block,
    stride_channel,
    stride_column,
    HISTORY: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    # A verify leaves [history[1:], x_0 .. x_(q-1)]: the window after n tokens begins in column
    # n - 1. The next step wants it in column 0.
    row = tl.program_id(1)
    layer = layer_ptr + tl.program_id(2) * 4
    plan = plan_ref + tl.load(layer + 3) + row * 5
    length = tl.load(plan)
    if length == 0:
        return
    source = tl.load(plan + 1).to(tl.int64)
    final = tl.load(plan + 2).to(tl.int64)
    boundary = tl.load(plan + 3).to(tl.int64)
    if (length == 1) & (source == final):
        return
    conv = conv_ref + tl.multiple_of(tl.load(layer + 1), ALIGNMENT)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = tl.arange(0, BLOCK_H)
    mask = (channel < channels)[:, None] & (column < HISTORY)[None, :]
    window = channel[:, None] * stride_channel + column[None, :] * stride_column
    begin = conv + source * stride_block
    # The tile is read before any of it is written: source and targets may be one block.
    last = tl.load(begin + window + (length - 1) * stride_column, mask=mask)
    if boundary > 0:
        skip = (tl.load(plan + 4) - 1) * stride_column
        full = tl.load(begin + window + skip, mask=mask)
        tl.store(conv + boundary * stride_block + window, full, mask=mask)
    tl.store(conv + final * stride_block + window, last, mask=mask)


@triton.jit
def fold_kernel(
    state_ref,  # [blocks, heads, V, K], the first layer's
    record_ref,  # [rows * Q, 3, heads, K], the first layer's
    plan_ref,
    layer_ptr,  # int64 [layers, 4]: offsets of state, convolution, records and plan
    row_ptr,  # int32 [rows]: the rows of plan and records; None: 0, 1, ...
    STRIDE_STATE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q: tl.constexpr,
    BV: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    NV: tl.constexpr = V // BV
    row = tl.program_id(1).to(tl.int64)
    if row_ptr is not None:
        row = tl.load(row_ptr + row).to(tl.int64)
    layer = layer_ptr + tl.program_id(2) * 4
    plan = plan_ref + tl.load(layer + 3) + row * 5
    length = tl.load(plan)
    if length == 0:
        return
    source = tl.load(plan + 1).to(tl.int64)
    final = tl.load(plan + 2).to(tl.int64)
    boundary = tl.load(plan + 3).to(tl.int64)
    boundary_len = tl.load(plan + 4)

    # The offsets' alignment is what lets each thread move 16 bytes at once.
    states = state_ref + tl.multiple_of(tl.load(layer), ALIGNMENT)
    record = record_ref + tl.multiple_of(tl.load(layer + 2), ALIGNMENT) + row * (Q * 3 * H * K)
    head = tl.program_id(0) // NV
    keys = head * K + tl.arange(0, K)
    values = head * V + (tl.program_id(0) % NV) * BV + tl.arange(0, BV)
    tile = values[:, None] * K + tl.arange(0, K)[None, :]
    state = tl.load(states + source * STRIDE_STATE + tile).to(tl.float32)
    for step in range(length):
        key = tl.load(record + keys)
        decay = tl.load(record + H * K + keys)
        correction = tl.load(record + 2 * H * K + values)
        # Explicit, so that no compiler may fuse the other product instead.
        state = tl.fma(
            tl.broadcast_to(correction[:, None], [BV, K]),
            tl.broadcast_to(key[None, :], [BV, K]),
            state * decay[None, :],
        )
        if (boundary > 0) & (step + 1 == boundary_len):
            tl.store(states + boundary * STRIDE_STATE + tile, state.to(state_ref.dtype.element_ty))
        record += 3 * H * K
    tl.store(states + final * STRIDE_STATE + tile, state.to(state_ref.dtype.element_ty))
