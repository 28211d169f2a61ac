"""The Triton kernels of the deferred RecoverSSM: fold plan, settlement, and the verify.

A *record row* holds what one verify of one request wrote, for later folding: the fp32 corrections
[heads, window, V] and, in the activations' type, keys and raw gates [heads, window, 2K]. There are
``halves`` sets of ``slots + 1`` record rows: slot s of half h is row ``h * (slots + 1) + s``, and
the last row of a half is scratch for rows that no request owns. A slot's ``turn`` counts its
settled verifies: the half ``turn % halves`` holds the pending tokens, and the next verify writes
the half after it. With one half, pending tokens are folded before the verify.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.models.kimi_k3.nvidia.ops.recoverssm import KDARecoverSSMRecords, _kda_gate
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID


@triton.jit(do_not_specialize=["num_slots"])
def plan_folds_kernel(
    slots_ptr,
    pending_ptr,
    turn_ptr,
    folded_ptr,
    state_indices_ptr,
    fold_lens_ptr,
    read_rows_ptr,
    write_rows_ptr,
    due_lens_ptr,
    due_states_ptr,
    due_boundaries_ptr,
    null_block_id,
    num_slots,
    stride_state_indices,
    HALVES: tl.constexpr,
    BY_RECORD: tl.constexpr,
):
    """Per verify row: how many pending tokens to fold, from which record row, and where to write.

    Marks them as folded, so that a second plan for the same pending tokens has nothing to fold.
    ``BY_RECORD`` also files them under their record row, for a fold that runs over records.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int32)
    state = tl.load(state_indices_ptr + row * stride_state_indices)
    live = (slot >= 0) & (state > null_block_id)
    slot = tl.where(live, slot, num_slots)  # scratch
    turn = tl.load(turn_ptr + slot, mask=live, other=0)
    folded = tl.load(folded_ptr + slot, mask=live, other=0)
    due = tl.load(pending_ptr + slot, mask=live & (turn != folded), other=0)
    tl.store(folded_ptr + slot, turn, mask=live)
    read = (turn % HALVES) * (num_slots + 1) + slot
    tl.store(fold_lens_ptr + row, due)
    tl.store(read_rows_ptr + row, read)
    tl.store(write_rows_ptr + row, ((turn + 1) % HALVES) * (num_slots + 1) + slot)
    if BY_RECORD:
        tl.store(due_lens_ptr + read, due, mask=live)
        tl.store(due_states_ptr + read, state.to(tl.int32), mask=live)
        tl.store(due_boundaries_ptr + read, null_block_id, mask=live)


@triton.jit(do_not_specialize=["num_slots"])
def settle_kernel(
    slots_ptr,
    eager_ptr,
    state_indices_ptr,
    commit_lens_ptr,
    final_states_ptr,
    boundary_states_ptr,
    boundary_lens_ptr,
    pending_ptr,
    turn_ptr,
    due_lens_ptr,
    due_states_ptr,
    due_finals_ptr,
    due_boundaries_ptr,
    due_boundary_lens_ptr,
    num_slots,
    stride_state_indices,
    HALVES: tl.constexpr,
    HAS_EAGER: tl.constexpr,
):
    """Per verify row: its accepted tokens become pending, or due at once if the row is eager.

    Sets the count also to 0: an older count would be folded a second time.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int32)
    if slot < 0:
        return
    accepted = tl.load(commit_lens_ptr + row)
    turn = tl.load(turn_ptr + slot) + 1
    tl.store(turn_ptr + slot, turn)
    kept = accepted
    if HAS_EAGER:
        eager = tl.load(eager_ptr + row) != 0
        kept = tl.where(eager, 0, accepted)
        record = (turn % HALVES) * (num_slots + 1) + slot
        state = tl.load(state_indices_ptr + row * stride_state_indices).to(tl.int32)
        tl.store(due_lens_ptr + record, accepted, mask=eager)
        tl.store(due_states_ptr + record, state, mask=eager)
        tl.store(due_finals_ptr + record, tl.load(final_states_ptr + row), mask=eager)
        tl.store(due_boundaries_ptr + record, tl.load(boundary_states_ptr + row), mask=eager)
        tl.store(due_boundary_lens_ptr + record, tl.load(boundary_lens_ptr + row), mask=eager)
    tl.store(pending_ptr + slot, kept)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x) + 1e-6)


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
    SPLITS: tl.constexpr,
    USE_LOWER_BOUND: tl.constexpr,
):
    """What ``due`` pending tokens do to a state: its decay [K], then what they add."""
    KS: tl.constexpr = K // SPLITS
    after = tl.full([K], 1.0, tl.float32)  # the decay that follows a token
    added = tl.zeros([SPLITS, BV, KS], tl.float32)
    for back in range(due):
        t = due - 1 - back
        k = tl.load(key_gate_ptr + t * stride_key_gate_token + offs_k).to(tl.float32)
        g = tl.load(key_gate_ptr + t * stride_key_gate_token + K + offs_k).to(tl.float32)
        u = tl.load(correction_ptr + t * stride_correction_token + offs_v)
        added += u[None, :, None] * tl.reshape(_unit(k) * after, (SPLITS, 1, KS))
        after *= tl.exp(_kda_gate(g, dt_bias, a, lower_bound, USE_LOWER_BOUND))
    return after, added


@triton.jit(do_not_specialize=["scratch_row"])
def verify_kernel(
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
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    USE_LOWER_BOUND: tl.constexpr,
):
    """One head's block of ``BV`` values of one row: fold and write the checkpoint, verify.

    The state block is kept as [SPLITS, BV, K / SPLITS]: the first axis stays inside a thread, so a
    sum over the keys exchanges between 32 / SPLITS of a warp's lanes and for fewer values each.
    """
    block = tl.program_id(0)
    row = tl.program_id(1)
    head = tl.program_id(2)
    KS: tl.constexpr = K // SPLITS

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
    k_split = tl.arange(0, SPLITS)[:, None, None] * KS + tl.arange(0, KS)[None, None, :]
    state_ptrs = state_ptr + state_index * stride_state + head * stride_state_head
    state_ptrs += offs_v[None, :, None] * stride_state_v + k_split * stride_state_k

    due = tl.load(fold_lens_ptr + row)
    read_row = tl.load(read_rows_ptr + row).to(tl.int64)
    old_kg = key_gate_ptr + read_row * stride_key_gate + head * stride_key_gate_head
    old_u = correction_ptr + read_row * stride_correction + head * stride_correction_head
    after, added = _pending(
        old_kg, old_u, due, offs_k, offs_v, stride_key_gate_token, stride_correction_token,
        dt_bias, a, lower_bound, K, BV, SPLITS, USE_LOWER_BOUND,
    )  # fmt: skip
    state = tl.load(state_ptrs).to(tl.float32)
    state = state * tl.reshape(after, (SPLITS, 1, KS)) + added
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
        query = tl.reshape(q32, (SPLITS, 1, KS))
        key = tl.reshape(_unit(k.to(tl.float32)), (SPLITS, 1, KS))

        state *= tl.reshape(tl.exp(gate), (SPLITS, 1, KS))
        u = v.to(tl.float32) - tl.sum(tl.sum(state * key, axis=0), axis=1)
        u *= tl.sigmoid(beta.to(tl.float32))
        state += u[None, :, None] * key
        out = tl.sum(tl.sum(state * query, axis=0), axis=1)

        tl.store(out_ptr + token * stride_out + head * V + offs_v, out, mask=valid & (offs_v < V))
        tl.store(new_u + t * stride_correction_token + offs_v, u, mask=valid & (offs_v < V))
        if block == 0:
            tl.store(new_kg + t * stride_key_gate_token + offs_k, k, mask=valid & (offs_k < K))
            tl.store(new_kg + t * stride_key_gate_token + K + offs_k, g, mask=valid & (offs_k < K))


@dataclass(frozen=True)
class Launch:
    """How a verify is cut: values a program, thread-local key splits, warps."""

    block_v: int
    splits: int
    warps: int


# The fastest one.
FUSED_LAUNCH = Launch(block_v=16, splits=4, warps=1)


@dataclass(frozen=True)
class Folds:
    """Per verify row, int32 [rows]: pending tokens to fold first, and their record row."""

    lens: torch.Tensor
    rows: torch.Tensor


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
    launch: Launch | None = None,
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
    launch = launch or FUSED_LAUNCH
    _, tokens, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    rows = state_indices.shape[0]
    block_v = min(launch.block_v, value_dim)
    if key_dim & (key_dim - 1) or key_dim % launch.splits or value_dim % block_v:
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
    correction, key_gate = records.correction, records.key_gate
    verify_kernel[(value_dim // block_v, rows, heads)](
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
        BV=block_v,
        SPLITS=launch.splits,
        WINDOW=spec_query_len,
        USE_LOWER_BOUND=lower_bound is not None,
        num_warps=launch.warps,
    )
    return out
