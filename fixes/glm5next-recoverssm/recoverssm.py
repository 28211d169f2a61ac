# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3-Flash's KDA layers with one recurrent state a request (RecoverSSM).

Stock keeps 1 + num_speculative_tokens states of each request and writes one for every verified
token. Here a request has one: the verify only reads it, and after sampling the commit applies the
accepted tokens. Source: the RecoverSSM fix of the public GLM-5.3-Flash recipes, written anew for
vLLM 0.33.0.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.models.glm5next.common.recoverssm_commit import (
    CommitRows,
    Glm5NextRecoverSSMCommitContext,
    Records,
    allocate_records,
    kda_recoverssm_verify,
)
from vllm.models.glm5next.common.recoverssm_metadata import (
    Glm5NextRecoverSSMMetadata,
    Glm5NextRecoverSSMState,
    record_state_blocks,
)
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import (
    NULL_BLOCK_ID,
    compute_causal_conv1d_metadata,
    mamba_get_block_table_tensor,
)
from vllm.v1.kv_cache_interface import MambaSpec

__all__ = [
    "Glm5NextRecoverSSMBackend",
    "Glm5NextRecoverSSMCommitContext",
    "Glm5NextRecoverSSMMetadata",
    "Glm5NextRecoverSSMMetadataBuilder",
    "Records",
    "allocate_records",
    "attn_backend",
    "kda_recoverssm_verify",
    "model_state_cls",
    "record_rows",
    "record_state_blocks",
]


def check_config(vllm_config: VllmConfig) -> None:
    """Raise RuntimeError for a configuration in which a state would be lost without a word."""
    from vllm.models.glm5next.common import model

    for name in ("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration"):
        if not hasattr(getattr(model, name), "get_model_state_cls"):
            raise RuntimeError(f"RecoverSSM: nothing commits for {name}, its hook is missing")
    cache_config = vllm_config.cache_config
    window = 1 + vllm_config.num_speculative_tokens
    head_dim = vllm_config.model_config.hf_text_config.linear_head_dim
    if window == 1:
        raise RuntimeError("RecoverSSM: there is nothing to verify without speculative decoding")
    if not vllm_config.use_v2_model_runner:
        raise RuntimeError("RecoverSSM: only the V2 model runner has the step that commits")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise RuntimeError(
            "RecoverSSM: pipeline stages but the last do not learn what was accepted"
        )
    if cache_config.mamba_cache_mode not in ("none", "align"):
        raise RuntimeError("RecoverSSM: the mamba cache mode must be none or align")
    if cache_config.mamba_cache_mode == "align" and cache_config.mamba_block_size < window:
        raise RuntimeError(
            f"RecoverSSM: a mamba block of {window} tokens or more must hold a whole window"
        )
    if head_dim & (head_dim - 1):
        raise RuntimeError(f"RecoverSSM: the head size {head_dim} is no power of two")


@dataclass(frozen=True)
class Split:
    """How a batch divides into rows that verify and rows that run as prefills."""

    spec_mask: torch.Tensor  # bool [batch], on the CPU
    rest_mask: torch.Tensor  # bool [batch], on the CPU: active rows that do not verify
    query_lens: torch.Tensor  # [batch], on the CPU
    num_spec: int
    num_rest: int
    num_rest_tokens: int

    @classmethod
    def of(cls, verifies: torch.Tensor, query_lens: torch.Tensor, longest: int) -> "Split":
        """``verifies`` bool [batch], of rows with up to ``longest`` tokens; both on the CPU."""
        active = query_lens > 0
        # A dummy row may be longer than the records are: it runs as a prefill.
        spec_mask = verifies & active & (query_lens <= longest)
        rest_mask = active & ~spec_mask
        num_spec, num_rest = int(spec_mask.sum()), int(rest_mask.sum())
        tokens = int(query_lens[rest_mask].sum()) if num_rest else 0
        return cls(spec_mask, rest_mask, query_lens, num_spec, num_rest, tokens)


class Glm5NextRecoverSSMMetadataBuilder(GDNAttentionMetadataBuilder):
    """GDN metadata with one state slot a verifying row.

    Every running decode row verifies, with drafts or without: so its convolution window is always
    where the last commit left it. A step without such rows is the GDN builder's. One builder
    describes a step; those of the other KV-cache groups put their own blocks into what it made.
    """

    metadata_cls: type[Glm5NextRecoverSSMMetadata] = Glm5NextRecoverSSMMetadata

    # The V2 runner computes the aligned indices for builders that have this attribute.
    mamba_aligned_state_indices: torch.Tensor | None = None

    def __init__(
        self,
        kv_cache_spec: MambaSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_config(vllm_config)
        self.supports_update_block_table = True
        self.spec_query_len = self.num_spec + 1
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        rows = max(self.decode_cudagraph_max_bs, self.max_num_reqs)
        self.rs_state_indices = torch.zeros(rows, dtype=torch.int32, device=device)
        # The commit has moved each window to column 0, which is where one token would be.
        self.rs_ones = torch.ones(rows, dtype=torch.int32, device=device)
        self.recoverssm_context: Glm5NextRecoverSSMCommitContext | None = None

    def _get_context(self) -> Glm5NextRecoverSSMCommitContext:
        forward_context = self.vllm_config.compilation_config.static_forward_context
        layers = [forward_context[name] for name in self.layer_names]
        context = self.recoverssm_context
        # Binding a KV cache gives each layer a new tuple.
        if context is None or any(
            layer.kv_cache is not cache for layer, cache in zip(layers, context.caches, strict=True)
        ):
            context = self.recoverssm_context = Glm5NextRecoverSSMCommitContext.create(
                layers, spec_query_len=self.spec_query_len, max_num_reqs=self.max_num_reqs
            )
        return context

    def _split(self, m: CommonAttentionMetadata, num_draft_tokens: torch.Tensor) -> Split:
        verifies = num_draft_tokens >= 0
        if m.is_prefilling is not None:
            verifies |= ~m.is_prefilling
        return Split.of(verifies, m.query_start_loc_cpu.diff(), self.spec_query_len)

    def _state_blocks(self, m: CommonAttentionMetadata) -> torch.Tensor:
        """Return each row's state block: int32 [batch]."""
        if self.mamba_aligned_state_indices is not None:
            return self.mamba_aligned_state_indices[: m.num_reqs, 0]
        mode = self.vllm_config.cache_config.mamba_cache_mode
        return mamba_get_block_table_tensor(
            m.block_table_tensor, m.seq_lens, self.kv_cache_spec, mode
        )[:, 0]

    def _regathered_blocks(self, block_table: torch.Tensor) -> torch.Tensor:
        """Return each row's state block in this group of a step that another has described."""
        if self.vllm_config.cache_config.mamba_cache_mode == "align":
            assert self.mamba_aligned_state_indices is not None
            return self.mamba_aligned_state_indices[:, 0]
        return block_table[:, 0]

    def build(  # type: ignore[override]
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> GDNAttentionMetadata:
        """Return metadata for the layers, and for the commit if any row verifies."""
        m = common_attn_metadata
        split = None
        if num_decode_draft_tokens_cpu is not None:
            split = self._split(m, num_decode_draft_tokens_cpu)
        if split is None or split.num_spec == 0:
            return super().build(common_prefix_len, m, num_accepted_tokens, None, fast_build)
        return self._build_mixed(m, split) if split.num_rest else self._build_uniform(m, split)

    def update_block_table(
        self,
        metadata: GDNAttentionMetadata,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> GDNAttentionMetadata:
        """Return a step's metadata, as another group's builder made it, with this group's blocks.

        ``blk_table`` int32 [batch, columns]; ``slot_mapping`` has no part in it.
        """
        if not isinstance(metadata, Glm5NextRecoverSSMMetadata):
            return super().update_block_table(metadata, blk_table, slot_mapping)
        blocks, commit = self._regathered_blocks(blk_table), metadata.recoverssm_commit
        assert commit is not None and metadata.spec_state_indices_tensor is not None
        own: dict[str, Any] = {}
        rows, rest = metadata.num_spec_decodes, metadata.rest_indices
        if rest is None:
            batch = metadata.spec_state_indices_tensor.shape[0]
            blocks = self._stage_blocks(blocks[:rows], batch, metadata.num_spec_decode_tokens)
        else:
            own["non_spec_state_indices_tensor"] = blocks[rest]
            blocks = blocks[commit.request_indices]
            if metadata.checkpoint is not None:
                own["checkpoint"] = metadata.checkpoint.regather_state_indices(blk_table)
        table = None if commit.block_table is None else blk_table
        own["recoverssm_commit"] = replace(commit, state_indices=blocks[:rows], block_table=table)
        own["recoverssm_context"] = self._get_context()
        own["spec_state_indices_tensor"] = blocks.unsqueeze(1)
        return self._regrouped(metadata, own)

    def _regrouped(
        self, metadata: Glm5NextRecoverSSMMetadata, own: dict[str, Any]
    ) -> Glm5NextRecoverSSMMetadata:
        """Return a step's metadata with what this group has of its ``own``."""
        return replace(metadata, **own)

    def _stage_blocks(self, blocks: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
        """Return the blocks, of ``batch`` rows in a graph's buffer if the step may be replayed.

        The rows above those of ``blocks`` pad the graph, and have the null block.
        """
        if not self._stage_spec_decode(0, 0, batch, tokens):
            return blocks
        rows = blocks.shape[0]
        self.rs_state_indices[:rows].copy_(blocks, non_blocking=True)
        if rows < batch:
            self.rs_state_indices[rows:batch].fill_(NULL_BLOCK_ID)
        return self.rs_state_indices[:batch]

    def _build_uniform(
        self, m: CommonAttentionMetadata, split: Split
    ) -> Glm5NextRecoverSSMMetadata:
        """All active rows verify; rows that pad a CUDA graph come after them."""
        rows, tokens = split.num_spec, int(m.query_start_loc_cpu[-1])
        blocks = self._stage_blocks(self._state_blocks(m)[:rows], m.num_reqs, tokens)
        start_loc = m.query_start_loc[: rows + 1]
        if self._stage_spec_decode(0, 0, m.num_reqs, tokens):
            self.spec_query_start_loc[: rows + 1].copy_(start_loc, non_blocking=True)
            if rows < m.num_reqs:
                self.spec_query_start_loc[rows + 1 : m.num_reqs + 1].fill_(start_loc[-1])
            start_loc = self.spec_query_start_loc[: m.num_reqs + 1]
        return self._metadata(m, split, blocks, start_loc, None)

    def _build_mixed(self, m: CommonAttentionMetadata, split: Split) -> Glm5NextRecoverSSMMetadata:
        """Some rows verify; the others run as prefills, in an order of their own."""
        device = m.query_start_loc.device
        num_tokens = int(m.query_start_loc_cpu[-1])
        query_lens = m.query_start_loc.diff()
        spec_mask = async_tensor_h2d(split.spec_mask, device=device)
        spec_rows, rest_rows = (
            mask.nonzero(as_tuple=True)[0] for mask in (split.spec_mask, split.rest_mask)
        )
        by_token = torch.repeat_interleave(spec_mask, query_lens, output_size=num_tokens)
        # Stable: a row's tokens keep their order.
        order = torch.argsort(by_token, stable=True)
        rest_start_cpu = _start_loc(split.query_lens[rest_rows])
        nums_dict, batch_ptr, token_chunk_offset_ptr = compute_causal_conv1d_metadata(
            rest_start_cpu, device=device
        )
        spec_index = async_tensor_h2d(spec_rows, dtype=torch.int32, device=device)
        rest_index = async_tensor_h2d(rest_rows, device=device)
        blocks = self._state_blocks(m)
        return self._metadata(
            m,
            split,
            blocks[spec_index],
            _start_loc(query_lens[spec_index]),
            spec_index,
            has_initial_state=(m.compute_num_computed_tokens() > 0)[rest_index],
            non_spec_query_start_loc=_start_loc(query_lens[rest_index]),
            non_spec_state_indices_tensor=blocks[rest_index],
            spec_token_indx=order[split.num_rest_tokens :],
            non_spec_token_indx=order[: split.num_rest_tokens],
            nums_dict=nums_dict,
            batch_ptr=batch_ptr,
            token_chunk_offset_ptr=token_chunk_offset_ptr,
            checkpoint=self.checkpoint_builder.build(m, rest_rows.tolist()),
            rest_indices=rest_index,
        )

    def _metadata(
        self,
        m: CommonAttentionMetadata,
        split: Split,
        blocks: torch.Tensor,
        start_loc: torch.Tensor,
        request_indices: torch.Tensor | None,
        **rest: Any,
    ) -> Glm5NextRecoverSSMMetadata:
        align: dict[str, Any] = {}
        if self.kv_cache_spec.mamba_cache_mode == "align":
            align["block_table"] = m.block_table_tensor
            align["num_computed_tokens"] = m.compute_num_computed_tokens()
            align["mamba_block_size"] = self.kv_cache_spec.block_size
        rows = split.num_spec
        return self.metadata_cls(
            num_prefills=split.num_rest,
            num_prefill_tokens=split.num_rest_tokens,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=rows,
            num_spec_decode_tokens=int(m.query_start_loc_cpu[-1]) - split.num_rest_tokens,
            num_actual_tokens=m.num_actual_tokens,
            spec_query_start_loc=start_loc,
            spec_state_indices_tensor=blocks.unsqueeze(1),
            num_accepted_tokens=self.rs_ones[: blocks.shape[0]],
            recoverssm_commit=CommitRows(
                blocks[:rows], start_loc[: rows + 1], request_indices, **align
            ),
            recoverssm_context=self._get_context(),
            **rest,
        )


def _start_loc(lens: torch.Tensor) -> torch.Tensor:
    """Return the running sum of ``lens`` from 0, int32, on their device."""
    start = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, dim=0, out=start[1:])
    return start


class Glm5NextRecoverSSMBackend(GDNAttentionBackend):
    """The attention backend of GLM-5.3-Flash's KDA layers."""

    @staticmethod
    def get_name() -> str:
        return "GLM5NEXT_KDA_RECOVERSSM"

    @staticmethod
    def get_builder_cls() -> type[Glm5NextRecoverSSMMetadataBuilder]:
        return Glm5NextRecoverSSMMetadataBuilder


def is_deferred() -> bool:
    """Whether the flag asks for the deferred commit, ``fast``."""
    return bool(envs.VLLM_GLM5NEXT_RECOVERSSM == "fast")


def record_rows(vllm_config: VllmConfig) -> int:
    """Return how many rows of records a layer needs.

    Raises RuntimeError for what a deferred commit cannot serve: before a weight is loaded.
    """
    requests = int(vllm_config.scheduler_config.max_num_seqs)
    if not is_deferred():
        return requests
    from vllm.models.glm5next.common.recoverssm_deferred import check_deferred, rows_by_slot

    check_deferred(vllm_config)
    return rows_by_slot(requests)


def attn_backend() -> type[Glm5NextRecoverSSMBackend]:
    """Return the attention backend of the form that the flag chooses."""
    if not is_deferred():
        return Glm5NextRecoverSSMBackend
    from vllm.models.glm5next.common.recoverssm_deferred_builder import Glm5NextDeferredBackend

    return Glm5NextDeferredBackend


@cache
def model_state_cls() -> type:
    """Return the hybrid model state with RecoverSSM's commit hook.

    Stock makes the hook for ``cache_config.use_kda_recoverssm`` only, which vLLM's configuration
    allows for Kimi-K3 alone and sets back whenever it is validated again.
    """
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    class Glm5NextRecoverSSMModelState(MambaHybridModelState):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.recoverssm = Glm5NextRecoverSSMState()

    return Glm5NextRecoverSSMModelState
