# SPDX-License-Identifier: Apache-2.0
"""RecoverSSM with a deferred commit: the next verify folds a step's accepted tokens.

The exact form reads a request's state to verify, and reads and writes it to commit. Here the commit
only notes how many tokens were accepted; the next verify folds them into the checkpoint as it reads
it, and writes it: one read and one write a step. Records are the exact form's, but by request slot,
in two halves, because a verify reads a slot's pending tokens while it writes the next ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.models.glm5next.common.recoverssm_commit import (
    CommitTable,
    Glm5NextRecoverSSMCommitContext,
    Records,
)
from vllm.models.glm5next.common.recoverssm_metadata import (
    Glm5NextRecoverSSMMetadata,
    Glm5NextRecoverSSMState,
    plan_step,
)
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.recoverssm_metadata import RecoverSSMPostprocessMetadata

from vllm_overlay.kda import operands
from vllm_overlay.kda.folds import Commits, Ledger
from vllm_overlay.kda.verify import fold_verify

FIX = "glm5next-recoverssm"
HALVES = 2


def rows_by_slot(slots: int) -> int:
    """Return how many rows of records ``slots`` requests need: two halves, each with a scratch."""
    return HALVES * (slots + 1)


def check_deferred(vllm_config: VllmConfig) -> None:
    """Raise RuntimeError for what would move a state without its pending tokens."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.is_kv_transfer_instance:
        raise RuntimeError(
            "RecoverSSM: KV connectors and KV cache offload would move states without their "
            "pending tokens; set VLLM_GLM5NEXT_RECOVERSSM=1"
        )


def by_slot(records: Records) -> operands.Records:
    """Return a layer's records [rows * window, 3, heads, K] as the fused verify wants them."""
    parts = records.data.view(records.rows, records.q, *records.data.shape[1:]).unbind(2)
    keys, decays, corrections = (part.transpose(1, 2) for part in parts)
    return operands.Records(corrections, keys, decays, unit=True)


@dataclass(frozen=True)
class GroupLedger:
    """What one KV-cache group has folded, and what it must fold at once.

    ``due`` int32 [record rows, 5]: the ledger's due folds as rows of the commit's plan.
    """

    ledger: Ledger
    due: torch.Tensor

    @classmethod
    def create(cls, slots: int, turn: torch.Tensor) -> GroupLedger:
        """Return a group's ledger of ``slots`` slots, with nothing pending; see ``Ledger``."""
        due = torch.zeros((rows_by_slot(slots), 5), dtype=torch.int32, device=turn.device)
        ledger = Ledger.create(slots, HALVES, turn.device)
        return cls(replace(ledger, turn=turn, due=Commits(*due.unbind(1))), due)

    def fold(
        self,
        context: Glm5NextRecoverSSMCommitContext,
        slots: torch.Tensor,
        pending: torch.Tensor,
        blocks: torch.Tensor,
    ) -> None:
        """Fold at once what is pending of ``slots`` into the states in ``blocks``, int32 [n]."""
        folds = self.ledger.plan(slots, pending, blocks, by_record=True)
        self.ledger.due.finals.copy_(self.ledger.due.sources)
        table = CommitTable.create([replace(context, plan=self.due)])
        table.fold(blocks.shape[0], folds.rows)


@dataclass(frozen=True)
class Eager:
    """Rows that must be committed at once: int32 [rows], not 0 for these, and their indices."""

    mask: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, near: torch.Tensor, device: torch.device) -> Eager | None:
        """``near`` bool [rows] on the host; None if no row is."""
        rows = near.nonzero(as_tuple=True)[0]
        if not len(rows):
            return None
        return cls(
            async_tensor_h2d(near, dtype=torch.int32, device=device),
            async_tensor_h2d(rows, device=device),
        )


@dataclass
class DeferredStep:
    """What a step's verify and commit need of one group to defer.

    ``slots`` int32 [rows] or longer: each verify row's slot, -1 where no request owns the row.
    ``pending`` int32 [slots]; ``blocks`` int32 [rows]: the checkpoints. ``leads``: this group is
    the first of the step, and settles the counts and turns of all.
    """

    group: GroupLedger
    slots: torch.Tensor
    pending: torch.Tensor
    blocks: torch.Tensor
    eager: Eager | None
    leads: bool
    _first: object = field(default=None, init=False, repr=False)

    def plan(self, layer: object) -> operands.Folds:
        """Return what each row's verify has to fold.

        Each layer of a forward asks; the one that came first plans for all, so that a forward that
        is repeated, or captured, plans too. The device marks what it has folded.
        """
        if self._first is None:
            self._first = layer
        ledger = self.group.ledger
        if layer is self._first:
            ledger.plan(self.slots, self.pending, self.blocks, by_record=False)
        return ledger.folds


@dataclass
class Glm5NextDeferredMetadata(Glm5NextRecoverSSMMetadata):
    """A step in which rows verify, with the commit deferred."""

    deferred: DeferredStep | None = field(default=None, repr=False, compare=False)

    def verify(self, records: Records, **window: Any) -> torch.Tensor:
        """Verify a layer's window as the exact form does, and fold first what is pending.

        Operands as for ``kda_recoverssm_verify``; the checkpoints are written.
        """
        assert self.deferred is not None and self.spec_query_start_loc is not None
        step, ledger = self.deferred, self.deferred.group.ledger
        rows = step.blocks.shape[0]
        if rows > ledger.slots:
            raise ValueError("RecoverSSM: more rows verify than there are request slots")
        operand = operands.Window(
            q=window["q"],
            k=window["k"],
            v=window["v"],
            gate=window["g"],
            beta=window["beta"],
            a_log=window["a_log"].reshape(-1),
            gate_bias=window["g_bias"].reshape(-1),
            lower_bound=window["lower_bound"],
            start_loc=self.spec_query_start_loc[: rows + 1],
            blocks=step.blocks,
            size=records.q,
        )
        out = window["out"]
        return fold_verify(
            operand,
            window["checkpoint_state"],
            by_slot(records),
            ledger.write_rows,
            ledger.slots,
            step.plan(records),
            torch.empty_like(operand.v) if out is None else out,
            fix=FIX,
        )

    def commit_recoverssm_state(
        self, num_accepted_tokens: torch.Tensor
    ) -> RecoverSSMPostprocessMetadata | None:
        """Commit this group alone, the leading one first. The runner's hook commits all at once."""
        if self.recoverssm_context is not None:
            defer_groups(
                [self], self.recoverssm_context.table, due_table([self]), num_accepted_tokens
            )
        return self.postprocess_metadata()


def due_table(step: Sequence[Glm5NextRecoverSSMMetadata]) -> CommitTable:
    """Return the table of a step's groups whose plans are what is due, by record row."""
    contexts = []
    for metadata in step:
        assert isinstance(metadata, Glm5NextDeferredMetadata)
        assert metadata.deferred is not None and metadata.recoverssm_context is not None
        contexts.append(replace(metadata.recoverssm_context, plan=metadata.deferred.group.due))
    return CommitTable.create(contexts)


def defer_groups(
    step: Sequence[Glm5NextRecoverSSMMetadata],
    table: CommitTable,
    due: CommitTable,
    num_accepted_tokens: torch.Tensor,
) -> None:
    """Commit the convolutions of a step's groups, and the states of its eager rows only.

    ``table`` and ``due`` hold the layers of the same groups. The rest's tokens become pending.
    """
    rows = step[0].num_spec_decodes
    plan_step(step, table, num_accepted_tokens)
    table.compact(rows)
    for metadata in step:
        assert isinstance(metadata, Glm5NextDeferredMetadata)
        assert metadata.deferred is not None and metadata.recoverssm_context is not None
        this, eager = metadata.deferred, metadata.deferred.eager
        if this.leads or eager is not None:
            commits = Commits(*metadata.recoverssm_context.plan[:rows].unbind(1))
            mask = None if eager is None else eager.mask
            this.group.ledger.settle(this.slots, this.pending, commits, mask, advance=this.leads)
    if eager is not None:
        # A slot has had as many verifies in every group, so that its record row is the same.
        written = this.group.ledger.write_rows[eager.rows]
        due.fold(written.shape[0], written)


class Glm5NextDeferredState(Glm5NextRecoverSSMState):
    """The runner's hook, and what all KV-cache groups share.

    ``pending`` int32 [slots]: the accepted tokens of a slot's last verify that its checkpoint does
    not hold yet. ``turn`` int32 [slots]: a slot's settled verifies. ``slots`` int32 [slots]: each
    batch row's slot, or -1; a captured graph reads it. ``owners``: the same of the step's requests,
    on the host; None if its rows belong to none. ``verified`` bool [slots], on the host: slots that
    may have tokens pending. ``owing`` [rows] or None: batch rows whose tokens a step folds first.
    ``led``: a group of the step settles for all.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        super().__init__()
        self.pending = torch.zeros(slots, dtype=torch.int32, device=device)
        self.turn = torch.zeros(slots, dtype=torch.int32, device=device)
        self.slots = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self.owners: np.ndarray | None = None
        self.owing: torch.Tensor | None = None
        self.led = False
        self._folded: np.ndarray | None = None  # the slots of the owing rows
        self.verified = np.zeros(slots, dtype=bool)
        self._staged = 0  # rows of ``slots`` that have one
        self._due: tuple[CommitTable, CommitTable] | None = None

    def add_request(self, slot: int) -> None:
        """Forget what the slot's last owner left: a prefill commits its state itself."""
        self.pending[slot].fill_(0)
        self.verified[slot] = False

    def stage(self, slots: torch.Tensor | None, owners: np.ndarray | None) -> None:
        """Take a step's slots [requests], on the device and on the host; None: no request's."""
        count = 0 if slots is None else slots.shape[0]
        if slots is not None:
            self.slots[:count].copy_(slots, non_blocking=True)
        if count < self._staged:
            self.slots[count : self._staged].fill_(-1)
        if self._folded is not None:
            self.verified[self._folded] = False
        self._staged, self.owners, self.owing, self._folded = count, owners, None, None
        self.led = False

    def owe(self, rows: torch.Tensor) -> None:
        """Note that all groups fold what is pending of these batch rows [rows], on the host."""
        assert self.owners is not None
        self.owing = async_tensor_h2d(rows, device=self.pending.device)
        self._folded = self.owners[rows.numpy()]

    def _commit(
        self,
        step: Sequence[Glm5NextRecoverSSMMetadata],
        table: CommitTable,
        num_sampled: torch.Tensor,
    ) -> None:
        if self._due is None or self._due[0] is not table:
            self._due = (table, due_table(step))
        defer_groups(step, table, self._due[1], num_sampled)
