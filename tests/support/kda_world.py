"""A model's KDA layers, builders and model state around vLLM's own code, small enough to drive.

What vLLM does between the kernels is vLLM's: the model state's steps, the metadata builders, the
layers' verify. Made up are the weights, the prefills (which leave a given state) and the copies
across block boundaries, in torch. See ``kimi_world`` and ``glm_world``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu.model_states.recoverssm import RecoverSSMState
from vllm.v1.worker.utils import AttentionGroup

CONV = 4  # the short convolution's width


def unpin() -> None:
    """Make vLLM copy from ordinary memory: a platform that it does not know is taken for a GPU."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "PIN_MEMORY" in vars(module):
            module.PIN_MEMORY = False  # type: ignore[attr-defined]


def convolve(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    *,
    conv_state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """vLLM's ``causal_conv1d_update`` of RecoverSSM's verify, which wants a GPU, in torch."""
    out = torch.zeros_like(x) if out is None else out
    for row, index in enumerate(conv_state_indices.tolist()):
        begin, end = query_start_loc[row : row + 2].tolist()
        if index > 0:
            history = conv_state[index]
            line = torch.cat([history[:, : CONV - 1], x[begin:end].T], 1)
            windows = line.unfold(1, CONV, 1)
            out[begin:end] = torch.nn.functional.silu((windows * weight[:, None]).sum(-1)).T
            history[:, : line.shape[1] - 1] = line[:, 1:]
    return out


@dataclass(frozen=True)
class Sizes:
    """How big a world is."""

    heads: int = 2
    head_dim: int = 16
    num_spec: int = 3
    groups: int = 2  # KV-cache groups
    layers: int = 1  # per group
    slots: int = 4  # requests at a time
    block: int = 16  # tokens of a state block in align mode
    blocks: int = 64  # state blocks
    columns: int = 12  # of the block table
    mode: str = "align"
    dtype: torch.dtype = torch.float32  # of the state
    activation: torch.dtype = torch.float32
    lower_bound: float | None = -5.0
    device: str = "cpu"

    @property
    def window(self) -> int:
        return self.num_spec + 1

    @property
    def projection(self) -> int:
        return self.heads * self.head_dim


@dataclass
class Row:
    """One request's part of a step."""

    slot: int
    computed: int  # tokens before the step
    query: int
    drafts: int = -1  # -1: not a decode
    prefilling: bool = False
    unseen: int = 0  # how much too high the host's bound is


@dataclass
class Copies:
    """vLLM's copies of states in align mode, in torch (``MambaSpecDecodeGPUContext``)."""

    world: World

    def compute_aligned_state_indices(self, seq_lens: torch.Tensor, num_reqs: int) -> torch.Tensor:
        w = self.world
        column = ((seq_lens[:num_reqs].long() - 1) // w.sizes.block).clamp(min=0)
        index = w.input_table[:num_reqs].gather(1, column[:, None]).int()
        w.aligned[:num_reqs].copy_(index)
        return torch.stack([w.ids(group, w.aligned[:num_reqs]) for group in range(w.sizes.groups)])

    def run_fused_precopy(
        self,
        num_reqs: int,
        state_idx: torch.Tensor,
        src_col: torch.Tensor,
        src_off: torch.Tensor,
        idx_mapping: torch.Tensor,
    ) -> None:
        w = self.world
        for slot in idx_mapping.tolist():
            source, target = int(src_col[slot]), int(state_idx[slot])
            if source < 0 or source == target:
                continue
            assert int(src_off[slot]) == 0  # RecoverSSM commits: nothing is left to skip
            old, new = int(w.table[slot, source]), int(w.table[slot, target])
            for number, layer in enumerate(w.all_layers):
                for cache in layer.kv_cache:
                    cache[w.at(number, new)] = cache[w.at(number, old)]

    def run_fused_postprocess_align(
        self,
        num_reqs: int,
        num_accepted: torch.Tensor,
        state_idx: torch.Tensor,
        num_computed: torch.Tensor,
        idx_mapping: torch.Tensor,
    ) -> None:
        for slot in idx_mapping.tolist():
            done, aligned = divmod(int(num_computed[slot]), self.world.sizes.block)
            assert int(num_accepted[slot]) == 1
            assert aligned or not done or int(state_idx[slot]) == done - 1  # nothing to copy


def config(sizes: Sizes) -> Any:
    """The parts of a VllmConfig that the model state and the builders read."""
    spec = SimpleNamespace(
        num_speculative_tokens=sizes.num_spec,
        enable_adaptive_verification=False,
        parallel_drafting=False,
        use_eagle_block_drop=lambda: False,
    )
    cache = SimpleNamespace(
        use_kda_recoverssm=True, mamba_cache_mode=sizes.mode, mamba_block_size=sizes.block
    )
    graphs = SimpleNamespace(has_full_cudagraphs=lambda: True)
    compilation = SimpleNamespace(
        static_forward_context={}, cudagraph_mode=graphs, max_cudagraph_capture_size=None
    )
    return SimpleNamespace(
        additional_config={"gdn_prefill_backend": "triton"},
        speculative_config=spec,
        num_speculative_tokens=sizes.num_spec,
        num_hash_lookahead_tokens=0,
        cache_config=cache,
        compilation_config=compilation,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=sizes.slots),
        kv_transfer_config=None,
        use_v2_model_runner=True,
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(linear_head_dim=sizes.head_dim),
            dtype=sizes.activation,
            max_model_len=1 << 20,
        ),
    )


class World:
    """One model with KDA layers and its runner's state; a subclass says which model.

    ``all_layers`` have ``kv_cache`` (convolution [blocks, columns, channels], state). ``table``
    holds the first group's blocks; each other one has its own, see ``ids``.
    """

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        s = self.sizes = sizes
        device = torch.device(s.device)
        if device.type == "cpu":
            unpin()
        self.config = config(s)
        self.groups = [
            [self.layer(seed + 100 * g + n) for n in range(s.layers)] for g in range(s.groups)
        ]
        self.all_layers = [layer for layers in self.groups for layer in layers]
        self.table = torch.zeros(s.slots, s.columns, dtype=torch.int32, device=device)
        self.input_table = torch.zeros_like(self.table)
        self.aligned = torch.zeros(s.slots, 1, dtype=torch.int32, device=device)
        self.computed = torch.zeros(s.slots, dtype=torch.int32, device=device)
        self.query_start = torch.zeros(s.slots + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(s.slots, dtype=torch.int32, device=device)
        self.spec = MambaSpec(
            block_size=s.block,
            shapes=((1,), (1,)),
            dtypes=(torch.float32, torch.float32),
            mamba_cache_mode=s.mode,
        )
        self.attn_groups = [self._group(g) for g in range(s.groups)]
        self.kv_config = SimpleNamespace(kv_cache_groups=[None] * s.groups)
        self.state = self.model_state(device)

    def ids(self, group: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return a group's blocks for the first group's. The lowest ones, which warm-ups use and
        tests name, are the same in all groups, and so is the null block."""
        own = 1 + self.sizes.slots
        turned = own + (blocks - own + 7 * group) % (self.sizes.blocks - own)
        return torch.where(blocks < own, blocks, turned)

    def at(self, layer: int, block: int) -> int:
        """Return what the first group's block is for a layer, by its place in ``all_layers``."""
        return int(self.ids(layer // self.sizes.layers, torch.tensor(block)))

    # --- which model it is

    def layer(self, seed: int) -> Any:
        """Return a layer with random weights and empty caches."""
        raise NotImplementedError

    def builder(self, names: list[str]) -> tuple[Any, Any]:
        """Return the attention backend of a group's layers, and its metadata builder."""
        raise NotImplementedError

    def model_state(self, device: torch.device) -> Any:
        """Return the model's state; ``init_state`` gives one what vLLM's constructor would."""
        raise NotImplementedError

    def run(self, layer: Any, metadata: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return a layer's outputs of the verified tokens [1, tokens, heads, head size].

        ``inputs`` of all tokens: the convolution's [tokens, 3 * projection], the raw gate and the
        raw beta [1, tokens, heads, ...].
        """
        raise NotImplementedError

    def flush(self, slots: list[int], blocks: list[int]) -> None:
        """Fold the pending tokens of the slots into the checkpoints in the blocks."""
        raise NotImplementedError

    def records(self, layer: Any) -> list[torch.Tensor]:
        """Return a layer's records, by record row: halves of a row for each slot and a scratch."""
        raise NotImplementedError

    # --- what any model does

    def _group(self, index: int) -> list[AttentionGroup]:
        names = [f"{index}.{n}" for n in range(self.sizes.layers)]
        context = self.config.compilation_config.static_forward_context
        context.update(zip(names, self.groups[index], strict=True))
        backend, builder = self.builder(names)
        group = AttentionGroup(backend, names, self.spec, index)
        group.metadata_builders = [builder]
        return [group]

    def init_state(self, state: Any, device: torch.device) -> None:
        """Give a hybrid model state what its constructor would."""
        s = self.sizes
        state.vllm_config, state.cache_config = self.config, self.config.cache_config
        state.model_config = self.config.model_config
        state.device, state.max_num_reqs = device, s.slots
        state.rope_state = state.prompt_embeds_state = None
        state.num_accepted_tokens_gpu = torch.ones(s.slots, dtype=torch.int32, device=device)
        state._align_mode = s.mode == "align"
        state.recoverssm = RecoverSSMState()
        if state._align_mode:
            for name in ("_mamba_state_idx_gpu", "_mamba_src_col_gpu", "_mamba_src_off_gpu"):
                setattr(state, name, torch.zeros(s.slots, dtype=torch.int32, device=device))
            state._mamba_ctx = Copies(self)
            state._mamba_group_ids, state._mamba_spec = list(range(s.groups)), self.spec

    def verify(self, metadata: Any, inputs: list[tuple[torch.Tensor, ...]]) -> list[Any]:
        """Run every layer over a step's tokens, ``inputs`` by layer as for ``run``.

        Returns the outputs of the verified tokens by layer, None where nothing is verified.
        """
        groups = [group for groups in self.attn_groups for group in groups]
        names = [name for group in groups for name in group.layer_names]
        return [
            self.run(layer, metadata[name], given) if metadata[name].num_spec_decodes else None
            for name, layer, given in zip(names, self.all_layers, inputs, strict=True)
        ]

    def add_request(
        self, slot: int, computed: int, name: str = "", blocks: list[list[int]] | None = None
    ) -> None:
        self.state.add_request(
            slot, SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=blocks)
        )
        self.computed[slot] = computed

    def batch(self, rows: list[Row], padded: int | None = None) -> Any:
        """Return the step's InputBatch, with rows up to ``padded``, and stage its inputs."""
        count, padded = len(rows), padded or len(rows)
        queries = np.array([row.query for row in rows], dtype=np.int32)
        ends = np.array([row.computed + row.query for row in rows], dtype=np.int32)
        starts = np.full(padded + 1, queries.sum(), dtype=np.int32)
        starts[: count + 1] = np.concatenate([[0], np.cumsum(queries)])
        bound = np.zeros(padded, dtype=np.int32)
        bound[:count] = ends + np.array([row.unseen for row in rows], dtype=np.int32)
        self.query_start[: padded + 1] = torch.from_numpy(starts).to(self.query_start.device)
        self.seq_lens.zero_()
        self.seq_lens[:count] = torch.from_numpy(ends).to(self.seq_lens.device)
        slots = [row.slot for row in rows]
        self.input_table.zero_()
        self.input_table[:count] = self.table[slots]
        prefilling = np.array([row.prefilling for row in rows])
        return SimpleNamespace(
            num_reqs=count,
            num_reqs_after_padding=padded,
            num_tokens=int(starts[-1]),
            num_tokens_after_padding=padded * self.sizes.window,
            idx_mapping=torch.tensor(slots, dtype=torch.int64, device=self.table.device),
            idx_mapping_np=np.array(slots, dtype=np.intp),
            query_start_loc=self.query_start[: padded + 1],
            query_start_loc_np=starts,
            num_scheduled_tokens=queries,
            num_draft_tokens_per_req=np.array([max(row.drafts, 0) for row in rows], dtype=np.int32),
            max_query_len=None,
            seq_lens=self.seq_lens[:padded],
            seq_lens_cpu_upper_bound=torch.from_numpy(bound),
            is_prefilling_np=prefilling,
            prefill_runs_as_decode_np=None,
            prefill_len_np=np.ones(count, dtype=np.int32),
            dcp_local_seq_lens=None,
            positions=None,
            prompt_lens=None,
        )

    def prepare(self, batch: Any, *, full: bool = False, for_capture: bool = False) -> Any:
        """Run the model state's ``prepare_attn``; return the metadata by layer name."""
        table = self.input_table[: batch.num_reqs_after_padding]
        tables = [self.ids(group, table) for group in range(self.sizes.groups)]
        if self.sizes.mode == "none":
            tables = [table[:, :1] for table in tables]
        return self.state.prepare_attn(
            batch,
            CUDAGraphMode.FULL if full else CUDAGraphMode.NONE,
            tables,
            tables,
            self.attn_groups,
            self.kv_config,
            for_capture=for_capture,
        )

    def start(self, batch: Any) -> None:
        """Run the model state's part before a real forward."""
        tables = (self.input_table,) * self.sizes.groups
        self.state.preprocess_state(batch, tables, self.kv_config, self.computed)

    def finish(self, batch: Any, sampled: list[int], advanced: list[int] | None = None) -> None:
        """Tell the model state how many tokens each row has got, and how far it has come."""
        device = self.table.device
        steps = advanced if advanced is not None else sampled
        for slot, count in zip(batch.idx_mapping.tolist(), steps, strict=True):
            self.computed[slot] += count
        counts = torch.tensor(sampled, dtype=torch.int32, device=device)
        self.state.postprocess_state(batch.idx_mapping, counts, self.computed)
