"""What the deferred RecoverSSM's kernels share: a step's fold plan, its settlement, the records.

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
from vllm.triton_utils import tl, triton

# Values a program, of one warp: the fastest of bench/kda_deferred.py's shapes in either kernel.
BLOCK_V = 16


@dataclass(frozen=True)
class Folds:
    """Per verify row, int32 [rows]: pending tokens to fold first, and their record row."""

    lens: torch.Tensor
    rows: torch.Tensor


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
def unit(x):
    """``x`` [K] at length 1, as vLLM's kernels norm keys."""
    return x * tl.rsqrt(tl.sum(x * x) + 1e-6)
