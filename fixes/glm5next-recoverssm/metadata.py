# SPDX-License-Identifier: Apache-2.0
"""What one step of GLM-5.3-Flash's RecoverSSM hands from its metadata to its commit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_not
from typing import Any

import torch
from vllm.models.glm5next.common.recoverssm_commit import (
    CommitRows,
    CommitTable,
    Glm5NextRecoverSSMCommitContext,
    Records,
    kda_recoverssm_verify,
    plan_commits,
)
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.recoverssm_metadata import (
    RecoverSSMMetadata,
    RecoverSSMPostprocessMetadata,
)
from vllm.v1.worker.gpu.model_states.recoverssm import (
    RecoverSSMState,
    _postprocess_recoverssm_align_kernel,
)


@dataclass
class Glm5NextRecoverSSMMetadata(GDNAttentionMetadata, RecoverSSMMetadata):
    """A step in which rows verify; ``num_spec_decodes`` counts them.

    ``rest_indices`` [rows that run as prefills]: their batch rows, if there are any.
    """

    recoverssm_commit: CommitRows | None = None
    recoverssm_context: Glm5NextRecoverSSMCommitContext | None = field(
        default=None, repr=False, compare=False
    )
    rest_indices: torch.Tensor | None = None

    def verify(self, records: Records, **window: Any) -> torch.Tensor:
        """Verify a layer's window: ``kda_recoverssm_verify`` of this step's rows."""
        assert self.spec_query_start_loc is not None
        assert self.spec_state_indices_tensor is not None
        rows = self.num_spec_decodes
        return kda_recoverssm_verify(
            **window,
            records=records,
            query_start_loc=self.spec_query_start_loc[: rows + 1],
            state_indices=self.spec_state_indices_tensor[:rows, 0],
        )

    def postprocess_metadata(self) -> RecoverSSMPostprocessMetadata | None:
        """What ``record_state_blocks`` needs after the commit; None outside align mode."""
        rows = self.recoverssm_commit
        if rows is None or rows.block_table is None:
            return None
        assert rows.num_computed_tokens is not None and rows.mamba_block_size is not None
        return RecoverSSMPostprocessMetadata(
            self.num_spec_decodes,
            rows.request_indices,
            rows.block_table,
            rows.num_computed_tokens,
            rows.mamba_block_size,
        )

    def commit_recoverssm_state(
        self, num_accepted_tokens: torch.Tensor
    ) -> RecoverSSMPostprocessMetadata | None:
        """Commit this group alone. The runner's hook commits all groups of a step at once."""
        if self.recoverssm_context is not None:
            commit_groups([self], self.recoverssm_context.table, num_accepted_tokens)
        return self.postprocess_metadata()


def commit_groups(
    step: Sequence[Glm5NextRecoverSSMMetadata],
    table: CommitTable,
    num_accepted_tokens: torch.Tensor,
) -> None:
    """Commit one step of the groups whose layers ``table`` holds, in three launches."""
    plan_step(step, table, num_accepted_tokens)
    table.apply(step[0].num_spec_decodes)


def plan_step(
    step: Sequence[Glm5NextRecoverSSMMetadata],
    table: CommitTable,
    num_accepted_tokens: torch.Tensor,
) -> None:
    """Plan the commit of a step's groups; ``num_accepted_tokens`` per batch row."""
    rows = []
    for metadata in step:
        assert metadata.recoverssm_commit is not None
        rows.append(metadata.recoverssm_commit)
    plan_commits(table.contexts, num_accepted_tokens, rows)


def record_state_blocks(
    meta: RecoverSSMPostprocessMetadata,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
) -> None:
    """Point each committed request at the block column of its last token, where its state is.

    All int32: ``idx_mapping`` [batch] batch row to request slot, ``num_sampled`` [batch],
    ``state_indices`` and ``num_accepted_tokens`` [slots]. vLLM 0.33.0's own kernel does it: the
    column that it records is the one that ``plan_kernel`` chose.
    """
    _postprocess_recoverssm_align_kernel[(meta.num_spec_decodes,)](
        idx_mapping,
        num_sampled,
        meta.request_indices,
        meta.num_computed_tokens,
        state_indices,
        num_accepted_tokens,
        MAMBA_BLOCK_SIZE=meta.block_size,
        BLOCK_TABLE_WIDTH=meta.block_table.shape[1],
    )


class Glm5NextRecoverSSMState(RecoverSSMState):
    """The runner's hook: commits a step's KV-cache groups together once tokens are sampled."""

    def __init__(self) -> None:
        super().__init__()
        self._table: CommitTable | None = None

    def commit_step(
        self,
        num_sampled: torch.Tensor | int,
        idx_mapping: torch.Tensor,
        *,
        state_indices: torch.Tensor | None,
        num_accepted_tokens: torch.Tensor,
    ) -> None:
        """Commit the recorded step, once. Arguments as for ``record_state_blocks``."""
        step, self._step = self._step, None
        if isinstance(num_sampled, int) or not step:
            return
        # A prompt's chunk of one token runs as a decode row, verifies and samples nothing unless it
        # is the last: its token is committed all the same. Other rows that verify sample one.
        num_sampled = num_sampled.clamp(min=1)
        contexts = tuple(metadata.recoverssm_context for metadata in step)
        # By identity: a context of a new cache has other tensors, and these do not compare.
        known = self._table.contexts if self._table else ()
        if self._table is None or any(map(is_not, known, contexts)):
            self._table = CommitTable.create(contexts)
        self._commit(step, self._table, num_sampled)
        # The groups share block size and token counts, so that one of them speaks for all.
        meta = step[0].postprocess_metadata()
        if meta is not None:
            assert state_indices is not None
            record_state_blocks(meta, idx_mapping, num_sampled, state_indices, num_accepted_tokens)

    def _commit(
        self,
        step: Sequence[Glm5NextRecoverSSMMetadata],
        table: CommitTable,
        num_sampled: torch.Tensor,
    ) -> None:
        commit_groups(step, table, num_sampled)
