# SPDX-License-Identifier: Apache-2.0
"""The metadata builder, backend and model state of RecoverSSM with a deferred commit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.models.glm5next.common import recoverssm
from vllm.models.glm5next.common.recoverssm_deferred import (
    DeferredStep,
    Eager,
    Glm5NextDeferredMetadata,
    Glm5NextDeferredState,
    GroupLedger,
)
from vllm.models.glm5next.common.recoverssm_metadata import Glm5NextRecoverSSMMetadata
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.utils import AttentionGroup

from vllm_overlay.kda.boundary import near_boundary
from vllm_overlay.kda.owners import Owners, is_dummy


class Glm5NextDeferredMetadataBuilder(recoverssm.Glm5NextRecoverSSMMetadataBuilder):
    """The exact form's metadata, with what the deferral of the step's commit needs."""

    metadata_cls = Glm5NextDeferredMetadata

    def __init__(
        self,
        kv_cache_spec: MambaSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._shared: Glm5NextDeferredState | None = None
        self._group: GroupLedger | None = None

    @property
    def shared(self) -> Glm5NextDeferredState:
        assert self._shared is not None, "the model state binds its builders"
        return self._shared

    @property
    def group(self) -> GroupLedger:
        assert self._group is not None, "the model state binds its builders"
        return self._group

    def bind(self, shared: Glm5NextDeferredState) -> None:
        """Take what all groups share, before a first build."""
        if self._shared is not shared:
            self._shared = shared
            self._group = GroupLedger.create(self.max_num_reqs, shared.turn)

    def fold(self, slots: torch.Tensor, blocks: torch.Tensor) -> None:
        """Fold what is pending of ``slots`` into the states in ``blocks``, both int32 [n]."""
        self.group.fold(self._get_context(), slots, self.shared.pending, blocks)

    def _split(
        self, m: CommonAttentionMetadata, num_draft_tokens: torch.Tensor
    ) -> recoverssm.Split:
        """As the exact form's; folds at once what is pending of rows that run as prefills.

        A prefill reads the checkpoint as it is. Rows of slots that have verified are rare among
        them: a prompt's chunk of one token verifies, and the next one may be longer.
        """
        split, shared = super()._split(m, num_draft_tokens), self.shared
        if shared.owners is not None and split.num_rest:
            rest = split.rest_mask[: len(shared.owners)]
            rows = (rest & torch.from_numpy(shared.verified[shared.owners])).nonzero(as_tuple=True)
            if len(rows[0]):
                shared.owe(rows[0])
                self._fold_owing(self._state_blocks(m))
        return split

    def _fold_owing(self, blocks: torch.Tensor) -> None:
        """Fold what is pending of the step's owing rows; ``blocks`` int32 [batch]."""
        if self.shared.owing is not None:
            self.fold(self.shared.slots[self.shared.owing], blocks[self.shared.owing])

    def update_block_table(
        self,
        metadata: GDNAttentionMetadata,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> GDNAttentionMetadata:
        """As the exact form's; folds at once what this group owes rows that run as prefills."""
        self._fold_owing(self._regathered_blocks(blk_table))
        return super().update_block_table(metadata, blk_table, slot_mapping)

    def _metadata(
        self,
        m: CommonAttentionMetadata,
        split: recoverssm.Split,
        blocks: torch.Tensor,
        start_loc: torch.Tensor,
        request_indices: torch.Tensor | None,
        **rest: Any,
    ) -> Glm5NextRecoverSSMMetadata:
        shared = self.shared
        if shared.owners is not None:
            verifying = split.spec_mask[: len(shared.owners)].numpy()
            shared.verified[shared.owners[verifying]] = True
        step = DeferredStep(
            group=self.group,
            slots=shared.slots if request_indices is None else shared.slots[request_indices],
            pending=shared.pending,
            blocks=blocks[: split.num_spec],
            eager=self._eager(m, split),
            leads=not shared.led,
        )
        shared.led = True
        return super()._metadata(
            m, split, blocks, start_loc, request_indices, deferred=step, **rest
        )

    def _regrouped(
        self, metadata: Glm5NextRecoverSSMMetadata, own: dict[str, Any]
    ) -> Glm5NextRecoverSSMMetadata:
        assert isinstance(metadata, Glm5NextDeferredMetadata) and metadata.deferred is not None
        blocks = own["recoverssm_commit"].state_indices
        own["deferred"] = replace(metadata.deferred, group=self.group, blocks=blocks, leads=False)
        return super()._regrouped(metadata, own)

    def _eager(self, m: CommonAttentionMetadata, split: recoverssm.Split) -> Eager | None:
        """Return the verify rows that this step or the next may bring to a block's end."""
        if self.kv_cache_spec.mamba_cache_mode != "align":
            return None
        ends = m.seq_lens_cpu_upper_bound
        if ends is None:
            near = torch.ones(split.num_spec, dtype=torch.bool)
        else:
            mask, block = split.spec_mask, self.kv_cache_spec.block_size
            near = near_boundary(ends[mask], split.query_lens[mask], block, self.spec_query_len)
        return Eager.of(near, m.query_start_loc.device)


class Glm5NextDeferredBackend(recoverssm.Glm5NextRecoverSSMBackend):
    """The attention backend of KDA layers that defer."""

    @staticmethod
    def get_name() -> str:
        return "GLM5NEXT_KDA_RECOVERSSM_DEFERRED"

    @staticmethod
    def get_builder_cls() -> type[Glm5NextDeferredMetadataBuilder]:
        return Glm5NextDeferredMetadataBuilder


@cache
def model_state_cls() -> type:
    """Return the exact form's model state with the pending tokens' rules: who owns a slot, and
    what becomes of its tokens when that changes."""
    base: Any = recoverssm.model_state_cls()

    class Glm5NextDeferredModelState(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.recoverssm = Glm5NextDeferredState(self.max_num_reqs, self.device)
            self._owners = Owners()
            self._builders: dict[int, Glm5NextDeferredMetadataBuilder] = {}

        def remove_request(self, req_id: str) -> None:
            super().remove_request(req_id)
            self._owners.leave(req_id)

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            left = self._owners.enter(new_req_data.req_id, req_index)
            if left is not None and self.recoverssm.verified[left]:
                self._fold_streamed(left, new_req_data)
            self.recoverssm.add_request(req_index)

        def _fold_streamed(self, slot: int, request: Any) -> None:
            """A request that gets more input keeps its blocks: fold what its old slot owes them."""
            for group, builder in self._builders.items():
                spec = builder.kv_cache_spec
                align = spec.mamba_cache_mode == "align"
                column = (request.num_computed_tokens - 1) // spec.block_size if align else 0
                slots, blocks = (
                    async_tensor_h2d([value], dtype=torch.int32, device=self.device)
                    for value in (slot, request.block_ids[group][column])
                )
                builder.fold(slots, blocks)

        def prepare_attn(
            self,
            input_batch: Any,
            cudagraph_mode: Any,
            block_tables: Any,
            slot_mappings: Any,
            attn_groups: list[list[AttentionGroup]],
            *args: Any,
            for_capture: bool = False,
            **kwargs: Any,
        ) -> dict[str, Any]:
            for group in (group for groups in attn_groups for group in groups):
                builder = group.get_metadata_builder(0)
                if isinstance(builder, Glm5NextDeferredMetadataBuilder):
                    builder.bind(self.recoverssm)
                    self._builders[group.kv_cache_group_id] = builder
            if for_capture or is_dummy(input_batch):
                self.recoverssm.stage(None, None)
            else:
                self.recoverssm.stage(input_batch.idx_mapping, input_batch.idx_mapping_np)
            metadata: dict[str, Any] = super().prepare_attn(
                input_batch,
                cudagraph_mode,
                block_tables,
                slot_mappings,
                attn_groups,
                *args,
                for_capture=for_capture,
                **kwargs,
            )
            return metadata

    return Glm5NextDeferredModelState
