"""Who has pending tokens, where they are recorded, and that each is folded once.

There are ``halves`` sets of ``slots + 1`` record rows: slot s of half h is row
``h * (slots + 1) + s``, and the last row of a half is scratch for rows that no request owns. A
slot's ``turn`` counts its settled verifies: the half ``turn % halves`` holds the pending tokens,
and the next verify writes the half after it. With one half, pending tokens are folded before the
verify.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_overlay.kda.operands import Folds


@triton.jit(do_not_specialize=["num_slots"])
def plan_folds_kernel(
    slots_ptr,
    pending_ptr,
    turn_ptr,
    folded_ptr,
    blocks_ptr,
    fold_lens_ptr,
    read_rows_ptr,
    write_rows_ptr,
    due_lens_ptr,
    due_sources_ptr,
    due_boundaries_ptr,
    num_slots,
    stride_blocks,
    stride_due,
    HALVES: tl.constexpr,
    BY_RECORD: tl.constexpr,
):
    """Per verify row: how many pending tokens to fold, from which record row, and where to write.

    Marks them as folded, so that a second plan for the same pending tokens has nothing to fold.
    ``BY_RECORD`` also files them under their record row, for a fold that runs over records.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int32)
    block = tl.load(blocks_ptr + row * stride_blocks).to(tl.int32)
    live = (slot >= 0) & (block > 0)
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
        tl.store(due_lens_ptr + read * stride_due, due, mask=live)
        tl.store(due_sources_ptr + read * stride_due, block, mask=live)
        tl.store(due_boundaries_ptr + read * stride_due, 0, mask=live)


@triton.jit(do_not_specialize=["num_slots"])
def settle_kernel(
    slots_ptr,
    eager_ptr,
    pending_ptr,
    turn_ptr,
    lens_ptr,
    sources_ptr,
    finals_ptr,
    boundaries_ptr,
    boundary_lens_ptr,
    due_lens_ptr,
    due_sources_ptr,
    due_finals_ptr,
    due_boundaries_ptr,
    due_boundary_lens_ptr,
    num_slots,
    stride_commit,
    stride_sources,
    stride_due,
    HALVES: tl.constexpr,
    ADVANCE: tl.constexpr,
):
    """Per verify row: its accepted tokens become pending, or due at once if the row is eager.

    Sets the count also to 0: an older count would be folded a second time. Without ``ADVANCE`` the
    slot has turned, and its count is set: only what is due remains to be said.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int32)
    if slot < 0:
        return
    at = row * stride_commit
    accepted = tl.load(lens_ptr + at)
    turn = tl.load(turn_ptr + slot)
    if ADVANCE:
        turn += 1
        tl.store(turn_ptr + slot, turn)
    kept = accepted
    if eager_ptr is not None:
        eager = tl.load(eager_ptr + row) != 0
        kept = tl.where(eager, 0, accepted)
        due = ((turn % HALVES) * (num_slots + 1) + slot) * stride_due
        source = tl.load(sources_ptr + row * stride_sources).to(tl.int32)
        tl.store(due_lens_ptr + due, accepted, mask=eager)
        tl.store(due_sources_ptr + due, source, mask=eager)
        tl.store(due_finals_ptr + due, tl.load(finals_ptr + at), mask=eager)
        tl.store(due_boundaries_ptr + due, tl.load(boundaries_ptr + at), mask=eager)
        tl.store(due_boundary_lens_ptr + due, tl.load(boundary_lens_ptr + at), mask=eager)
    if ADVANCE:
        tl.store(pending_ptr + slot, kept)


@dataclass(frozen=True)
class Commits:
    """What to commit of each row, int32 [rows]; nothing where ``lens`` is 0.

    ``lens``: tokens. ``sources``: the block of the state they apply to, ``finals``: the block the
    result goes to. ``boundaries``: the block, or 0, that gets the state after ``boundary_lens``
    tokens. All have one stride, only that of ``sources`` may be another.
    """

    lens: Tensor
    sources: Tensor
    finals: Tensor
    boundaries: Tensor
    boundary_lens: Tensor

    def __post_init__(self) -> None:
        parts = (self.lens, self.finals, self.boundaries, self.boundary_lens)
        if len({part.stride(0) for part in parts}) > 1:
            raise ValueError("KDA fold: the parts of a commit differ in their stride")

    @classmethod
    def over(cls, table: Tensor) -> Commits:
        """``table`` int32 [5, rows], in the order of the fields."""
        return cls(*table.unbind(0))


@dataclass(frozen=True)
class Ledger:
    """What one KV-cache group has folded of its slots' pending tokens, and a step's plan.

    ``turn`` and ``folded`` int32 [slots]: a slot's settled verifies, and which of them was folded
    last; ledgers of groups that settle together may have one ``turn``. ``folds`` and
    ``write_rows`` int32 [slots], by verify row: the step's plan, for ``verify.fold_verify``.
    ``due``: by record row, for a fold that runs over records.
    """

    slots: int
    halves: int
    turn: Tensor
    folded: Tensor
    folds: Folds
    write_rows: Tensor
    due: Commits

    @classmethod
    def create(cls, slots: int, halves: int, device: torch.device) -> Ledger:
        """A ledger of ``slots`` slots with nothing pending."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            slots=slots,
            halves=halves,
            turn=zeros(slots),
            folded=zeros(slots),
            folds=Folds(zeros(slots), zeros(slots)),
            write_rows=zeros(slots),
            due=Commits.over(zeros(5, halves * (slots + 1))),
        )

    def plan(self, rows: Tensor, pending: Tensor, blocks: Tensor, *, by_record: bool) -> Folds:
        """Plan the folds of a verify's rows, and count them as done; return ``folds``.

        ``rows`` int32 [rows] or longer: each one's slot, -1 where no request owns the row;
        ``pending`` int32 [slots]; ``blocks`` [rows]: their states. A second call in a step plans
        no fold. ``by_record`` also makes them due: ``due``, but for its ``finals``.
        """
        due = self.due
        if by_record:
            due.lens.zero_()
        plan_folds_kernel[(blocks.shape[0],)](
            rows,
            pending,
            self.turn,
            self.folded,
            blocks,
            self.folds.lens,
            self.folds.rows,
            self.write_rows,
            due.lens,
            due.sources,
            due.boundaries,
            self.slots,
            blocks.stride(0),
            due.lens.stride(0),
            HALVES=self.halves,
            BY_RECORD=by_record,
            num_warps=1,
        )
        return self.folds

    def settle(
        self,
        rows: Tensor,
        pending: Tensor,
        commits: Commits,
        eager: Tensor | None,
        *,
        advance: bool = True,
    ) -> None:
        """Keep what verify rows have accepted: pending, or due at once where the row is eager.

        ``rows`` and ``pending`` as in ``plan``; ``pending`` is set, also to 0. ``commits`` by
        verify row, as many as ``commits.sources`` has; ``eager`` int32 [rows] or None: not 0
        where the tokens are due now. Without ``advance`` another ledger with the same ``turn`` has
        settled the step, and only what is due is filed.
        """
        due = self.due
        if eager is not None:
            due.lens.zero_()
        settle_kernel[(commits.sources.shape[0],)](
            rows,
            eager,
            pending,
            self.turn,
            commits.lens,
            commits.sources,
            commits.finals,
            commits.boundaries,
            commits.boundary_lens,
            due.lens,
            due.sources,
            due.finals,
            due.boundaries,
            due.boundary_lens,
            self.slots,
            commits.lens.stride(0),
            commits.sources.stride(0),
            due.lens.stride(0),
            HALVES=self.halves,
            ADVANCE=advance,
            num_warps=1,
        )
