"""How many requests' states fit into the KV cache of a hybrid model, known before the start.

The arithmetic of vLLM 0.33.0: the size of a state (``MambaStateShapeCalculator``), the block that
attention and states share (``_align_hybrid_block_size`` in vllm/platforms/interface.py), the states
a request holds (``MambaSpec.max_memory_usage_bytes``) and the groups of layers
(vllm/v1/core/kv_cache_planning.py). Everything is of one rank, in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_overlay.hybridmodel import HybridShape
from vllm_overlay.hybridrank import NotCoveredError, Rank, model_length, number, up

RELEASE = "0.33.0"  # of vLLM, whose arithmetic this is
GPU_SHARE = 0.92  # vLLM's default of gpu-memory-utilization
DEFAULT_SEQS = 256  # max-num-seqs of vLLM where nothing sets it; 1024 on GPUs of 70 GiB and more


@dataclass(frozen=True)
class KvMemory:
    """What one rank has for its KV cache: bytes, or blocks if the recipe counts those.

    ``bound`` says that it is an upper bound: what the engine needs beside weights is not known.
    """

    bytes: int | None
    blocks: int | None
    source: str
    bound: bool = False


@dataclass(frozen=True)
class Capacity:
    """The memory of one rank's caches, and the requests that fit into it.

    ``conv`` + ``recurrent`` is one layer's state, ``page`` the room that it gets (its padding
    makes it equal to a block of attention), ``block_bytes`` what one block takes over all layers.
    In each of ``state_groups`` groups of layers a request holds one state, ``draft_slots`` more for
    draft tokens, and at times up to ``align_slots`` more for prefix caching: the last state of its
    block until it has gone on into the next, and a checkpoint of its prompt.
    """

    conv: int
    recurrent: int
    page: int
    block_tokens: int
    token_bytes: int
    block_bytes: int
    state_groups: int
    attention_groups: int
    ring_groups: int
    draft_slots: int
    align_slots: int
    window: int
    mode: str
    max_num_seqs: int | None
    max_model_len: int | None
    memory: KvMemory | None
    notes: tuple[str, ...]

    @property
    def state(self) -> int:
        """Bytes of one layer's state."""
        return self.conv + self.recurrent

    @property
    def slots(self) -> int:
        """States that a request holds in each group of layers."""
        return 1 + self.draft_slots + self.align_slots

    @property
    def blocks(self) -> int | None:
        """Blocks that requests can have: vLLM keeps one back."""
        if self.memory is None:
            return None
        total = self.memory.blocks
        if total is None:
            total = (self.memory.bytes or 0) // self.block_bytes
        return max(total - 1, 0)

    def blocks_of(self, tokens: int = 1, *, peak: bool = True) -> int:
        """Return the blocks that a request of this length holds, at most or most of the time."""
        attention = self.attention_groups * up(tokens, self.block_tokens)
        slots = self.slots if peak else 1 + self.draft_slots
        return self.state_groups * slots + self.ring_groups + attention

    def requests(self, tokens: int = 1, *, peak: bool = True) -> int | None:
        """Return how many requests of this length fit at once; None without a KV memory."""
        return None if self.blocks is None else self.blocks // self.blocks_of(tokens, peak=peak)

    @property
    def wanted(self) -> int:
        """The requests that vLLM would run at once."""
        return self.max_num_seqs or DEFAULT_SEQS


def sum_lines(result: Capacity) -> tuple[str, ...]:
    """Return the arithmetic line by line, as a reader would do it."""
    states = f"{1 + result.draft_slots} states"
    if result.draft_slots:
        states += f" (1 + {result.draft_slots} for drafts)"
    parts = [
        f"{result.state_groups} groups x {states}",
        *(["1 block of the indexer"] if result.ring_groups else []),
        f"{result.attention_groups} x 1 block of attention",
    ]
    lines = [
        f"one state: {result.conv:,} B of convolution + {result.recurrent:,} B recurrent "
        f"= {result.state:,} B a layer and GPU, in a page of {result.page:,} B",
        f"one block: {result.block_tokens:,} tokens, {result.block_bytes:,} B over all layers",
        f"one request: {' + '.join(parts)} = {result.blocks_of(peak=False):,} blocks",
    ]
    if result.align_slots:
        more = f"up to {result.align_slots} states more a group for prefix caching"
        lines.append(f"at its peak {more}: {result.blocks_of():,} blocks")
    if result.memory is None or result.blocks is None:
        return (*lines, *result.notes)
    source, blocks = result.memory.source, result.blocks
    if result.memory.bytes is not None:
        room = f"{result.memory.bytes:,} B ({source})"
        lines.append(f"the KV cache: {room} / {result.block_bytes:,} B - 1 kept back = {blocks:,}")
    else:
        lines.append(f"the KV cache: {blocks + 1:,} blocks ({source}) - 1 kept back = {blocks:,}")
    set_to = "is" if result.max_num_seqs else "is not set, and vLLM takes at least"
    most = "at most " if result.memory.bound else ""
    so = f"so {most}{result.requests(peak=False):,} requests' states fit"
    if result.align_slots:
        so += f", {result.requests():,} all at their peak"
    lines.append(f"{so}; max-num-seqs {set_to} {result.wanted:,}")
    if result.max_model_len:
        longest = f"{result.blocks_of(result.max_model_len):,} blocks"
        fit = result.requests(result.max_model_len)
        lines.append(f"of {result.max_model_len:,} tokens each ({longest}): {most}{fit:,} requests")
    return (*lines, *result.notes)


def gpu_share(serve: Mapping[str, Any]) -> float:
    """Return the share of each GPU's memory that vLLM takes."""
    value = serve.get("gpu-memory-utilization")
    return float(value) if isinstance(value, int | float) else GPU_SHARE


def kv_memory(
    serve: Mapping[str, Any], gpu_memory: int | None, weights: int | None
) -> KvMemory | None:
    """Return what a rank has for its KV cache, or None where nothing tells.

    ``gpu_memory`` and ``weights`` are bytes of one GPU. Without a pinned size it is an upper
    bound: the share of the GPU that vLLM takes, less the weights.
    """
    blocks = number(serve, "num-gpu-blocks-override")
    if blocks is not None:
        return KvMemory(None, blocks, "num-gpu-blocks-override")
    pinned = number(serve, "kv-cache-memory-bytes")
    if pinned is not None:
        return KvMemory(pinned, None, "kv-cache-memory-bytes")
    if gpu_memory is None or weights is None:
        return None
    share = gpu_share(serve)
    room = max(int(gpu_memory * share) - weights, 0)
    return KvMemory(room, None, f"{share:g} of the GPU less the weights", bound=True)


def capacity(
    shape: HybridShape,
    serve: Mapping[str, Any],
    *,
    recoverssm: bool,
    capability: str | None = None,
    memory: KvMemory | None = None,
) -> Capacity:
    """Return what the serve flags mean for a hybrid model's caches.

    ``recoverssm``: a request keeps one state and no state for each draft token. ``capability`` is
    the GPU's, such as "9.0"; None stands for an H200's. Raises NotCoveredError where the arithmetic
    does not hold, such as with pipeline parallelism.
    """
    for flag in ("pipeline-parallel-size", "decode-context-parallel-size"):
        if (number(serve, flag) or 1) > 1:
            raise NotCoveredError(f"{flag} above 1")
    rank = Rank.of(shape, serve, int((capability or "9.0").partition(".")[0]))
    block_tokens = rank.block_tokens()
    page = max(block_tokens * rank.aligned_token, rank.conv + rank.recurrent)
    layout = _packed(rank, block_tokens, page) if shape.indexer else _equal_pages(rank, page)
    return Capacity(
        conv=rank.conv,
        recurrent=rank.recurrent,
        page=page,
        block_tokens=block_tokens,
        token_bytes=rank.attention_layers * rank.layer_token,
        draft_slots=0 if recoverssm or rank.one_state else rank.drafts,
        align_slots=(1 + rank.fused_prefill) if rank.mode == "align" else 0,
        window=1 + rank.drafts,
        mode=rank.mode,
        max_num_seqs=number(serve, "max-num-seqs"),
        max_model_len=model_length(serve, shape),
        memory=memory,
        notes=rank.notes,
        **layout,
    )


def _packed(rank: Rank, block_tokens: int, page: int) -> dict[str, int]:
    """Return groups and block size where pages of several sizes lie side by side in a block.

    The ring in which an indexer collects its next entry takes a block a request, of one more group.
    """
    states, layers, indexer = rank.shape.state_layers, rank.attention_layers, rank.shape.indexer
    assert indexer is not None
    index_page = block_tokens // indexer.pool * indexer.entry
    room = layers * (block_tokens * rank.stored_token + index_page)
    groups = max(up(states, _even_share(states, layers)), up(states, room // page))
    return {
        "block_bytes": rank.stored_token * up(room, rank.stored_token),  # whole rows apart
        "state_groups": groups,
        "attention_groups": 1,
        "ring_groups": 1,
    }


def _even_share(states: int, attention: int) -> int:
    """Return the layers of a group that need the least padding; of several, the most layers.

    Attention counts twice: it has a ring for every layer.
    """
    choices = range(attention, max(states, attention) + 1)
    return min(choices, key=lambda share: (-states % share + 2 * (-attention % share), -share))


def _equal_pages(rank: Rank, page: int) -> dict[str, int]:
    """Return groups and block size where every layer has a page of the same size."""
    counts = (rank.shape.state_layers, rank.attention_layers)
    least, most = min(counts), max(counts)
    layers = most if most < least * 1.5 else least
    return {
        "block_bytes": layers * page,
        "state_groups": up(counts[0], layers),
        "attention_groups": up(counts[1], layers),
        "ring_groups": 0,
    }
