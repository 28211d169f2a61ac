"""Builds the KDA metadata of made-up steps with one vLLM's own builder; prints JSON.

``main`` runs in a process of its own, with that vLLM first on the path and Triton interpreted.
Nothing of the builder is replaced: its configuration and its layers are stand-ins with only what
it reads, so that the same steps can be built on every release.
"""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.models.kimi_k3.nvidia import kda
from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadataBuilder
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.kv_cache_interface import MambaSpec

BLOCK = 32  # tokens in a block of the cache
COLUMNS = 8  # blocks in a row of the block table
DRAFT = 4  # tokens that are drafted a step
WINDOW = DRAFT + 1
HISTORY = 3  # tokens that the convolution looks back
HEADS, DIM, STATES = 2, 8, 64
LAYERS = ["layers.0", "layers.1"]
CPU = torch.device("cpu")
# Where a release has it under this name: what it does with a checkpoint is looked at there.
STORE = getattr(kda, "_store_cache_checkpoints_kernel", None)


@dataclass(frozen=True)
class Row:
    """A request in a step; ``drafted`` is -1 where nothing was, as the model runner has it."""

    computed: int
    query: int
    drafted: int = -1
    prefilling: bool = True


PADDING = Row(0, 0, prefilling=False)
VERIFY = Row(70, WINDOW, DRAFT, prefilling=False)
LAST = Row(45, 1, prefilling=False)  # a decode whose draft was not scheduled
STEPS = {
    "prefill": [Row(0, 50), Row(0, 20), Row(64, 50), PADDING],
    "one token first": [Row(40, 1), Row(0, 50)],
    "mixed": [VERIFY, Row(0, 50), LAST, Row(0, 20), PADDING],
    "verify": [VERIFY, LAST],
}


def builder(mode: str) -> KimiK3KDAMetadataBuilder:
    """Return a builder of RecoverSSM with Mamba's cache mode ``mode``, for two layers."""
    graphs = SimpleNamespace(has_full_cudagraphs=lambda: False)  # staging for them wants a GPU
    compilation = SimpleNamespace(
        cudagraph_mode=graphs,
        max_cudagraph_capture_size=None,
        static_forward_context={name: layer() for name in LAYERS},
    )
    drafting = SimpleNamespace(
        num_speculative_tokens=DRAFT, parallel_drafting=False, use_eagle_block_drop=lambda: False
    )
    cache = SimpleNamespace(
        use_kda_recoverssm=True,
        use_replayssm=True,
        mamba_cache_mode=mode,
        prefix_match_unit=None,
        hash_block_size=BLOCK,
        cache_hit_alignment_tokens=BLOCK,
    )
    config = SimpleNamespace(
        compilation_config=compilation,
        speculative_config=drafting,
        num_speculative_tokens=DRAFT,
        num_hash_lookahead_tokens=0,
        cache_config=cache,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
        additional_config={},
        use_v2_model_runner=True,
    )
    known = {field.name for field in dataclasses.fields(MambaSpec)}
    wanted = {
        "block_size": BLOCK,
        "shapes": ((WINDOW + HISTORY - 1, HEADS * DIM), (HEADS, DIM, DIM)),
        "dtypes": (torch.float32, torch.float32),
        "mamba_cache_mode": mode,
        "num_prefill_checkpoint_blocks": 1,
        "prefill_checkpoint_alignment": 16,
    }
    spec = MambaSpec(**{name: value for name, value in wanted.items() if name in known})
    return KimiK3KDAMetadataBuilder(spec, LAYERS, config, CPU)


def layer() -> SimpleNamespace:
    """Return what the commit context reads of a KDA layer."""
    correction = torch.zeros(STATES, HEADS, WINDOW, DIM)
    key_gate = torch.zeros(STATES, HEADS, WINDOW, 2 * DIM)
    conv = torch.zeros(STATES, WINDOW + HISTORY - 1, HEADS * DIM)
    state = torch.zeros(STATES, HEADS, DIM, DIM)
    return SimpleNamespace(
        kv_cache=[conv, state, correction, key_gate],
        recoverssm_records=SimpleNamespace(correction=correction, key_gate=key_gate),
        recoverssm_backend="triton",
        A_log=torch.zeros(HEADS),
        dt_bias=torch.zeros(HEADS * DIM),
        local_num_heads=HEADS,
        head_dim=DIM,
        gate_lower_bound=-5.0,
    )


def block_table(rows: int) -> torch.Tensor:
    """Return [rows, COLUMNS] int32: the block of row r and column c is 1 + r * COLUMNS + c."""
    return torch.arange(1, 1 + rows * COLUMNS, dtype=torch.int32).view(rows, COLUMNS)


def common(rows: Sequence[Row]) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *(row.query for row in rows)], dtype=torch.int32).cumsum(0).int()
    lengths = torch.tensor([row.computed + row.query for row in rows], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=lengths,
        num_reqs=len(rows),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(row.query for row in rows),
        max_seq_len=int(lengths.max()),
        block_table_tensor=block_table(len(rows)),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        is_prefilling=torch.tensor([row.prefilling for row in rows]),
        seq_lens_cpu_upper_bound=lengths.clone(),
    )


def build(rows: Sequence[Row], mode: str, *, capture: bool = False) -> Any:
    """Return the metadata of a step, or of the capture of a graph for such a step."""
    m, made = common(rows), builder(mode)
    if mode == "align":  # the model runner hands each request's current block to the builder
        current = ((m.seq_lens - 1) // BLOCK).clamp(min=0).long()
        made.mamba_aligned_state_indices = m.block_table_tensor.gather(1, current[:, None])
    if capture:
        return made.build_for_cudagraph_capture(m)
    drafted = torch.tensor([row.drafted for row in rows], dtype=torch.int32)
    return made.build(0, m, torch.ones(len(rows), dtype=torch.int32), drafted)


def facts(metadata: Any) -> dict[str, Any]:
    """Return what a test compares, JSON-ready."""
    checkpoint, commit = metadata.checkpoint, metadata.recoverssm_commit
    context = metadata.recoverssm_context
    found: dict[str, Any] = {
        name: getattr(metadata, name)
        for name in ("num_prefills", "num_decodes", "num_spec_decodes", "num_prefill_tokens")
    }
    found["starts"] = listed(metadata.non_spec_query_start_loc)
    found["states"] = listed(metadata.non_spec_state_indices_tensor)
    found["has_state"] = listed(metadata.has_initial_state)
    found["offsets"] = listed(checkpoint.checkpoint_offsets) if checkpoint else None
    found["checkpoints"] = listed(checkpoint.state_indices) if checkpoint else None
    found["committed"] = listed(commit.state_indices[:, 0]) if commit else None
    found["layers"] = len(context.checkpoints) if context else None
    if checkpoint and STORE is not None:
        found["stored"] = stored(checkpoint, metadata.non_spec_query_start_loc)
    return found


def listed(tensor: torch.Tensor | None) -> list[Any] | None:
    return None if tensor is None else tensor.tolist()


def stored(checkpoint: Any, starts: torch.Tensor) -> dict[str, list[float]]:
    """Run vLLM's kernel that stores checkpoints, on tokens that hold their own number.

    Returns, for each block that it wrote, the tokens of its convolution state.
    """
    count = checkpoint.checkpoint_offsets.numel()
    tokens = torch.arange(1.0 * int(starts[-1]))[:, None].contiguous()
    conv, recurrent = torch.full((STATES, 1, HISTORY), -1.0), torch.zeros(STATES, 1)
    STORE[(count, 1)](
        tokens, conv, torch.ones(count, 1), recurrent, starts,
        checkpoint.checkpoint_offsets, checkpoint.state_indices,
        *tokens.stride(), *conv.stride(), 1, 1, 1, HISTORY, 1, 1, NULL_BLOCK_ID, 16,
    )  # fmt: skip
    assert bool((recurrent[:, 0] == (conv[:, 0, 0] >= 0)).all()), "blocks of only one of the two"
    return {str(i): conv[i, 0].tolist() for i in range(STATES) if recurrent[i]}


def outcome(rows: Sequence[Row], mode: str, **options: bool) -> dict[str, Any]:
    """Return the facts of a step, or the error that building it raised and where."""
    try:
        return facts(build(rows, mode, **options))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {error}", "in": last.name, "line": last.line}


def main() -> None:
    found = {name: outcome(rows, "align") for name, rows in STEPS.items()}
    found["prefill without cache"] = outcome(STEPS["prefill"], "none")
    found["capture"] = outcome([VERIFY, VERIFY], "align", capture=True)
    print(json.dumps(found))
