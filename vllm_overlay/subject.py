"""What rules can look at before the start: flags, the model's config.json, room on the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_overlay.capacity import KvMemory, kv_memory
from vllm_overlay.fix import Fix
from vllm_overlay.host import Gpu, gpus, host_memory
from vllm_overlay.hybridrank import NotCoveredError, number
from vllm_overlay.modelconfig import ModelConfig, read_model_config
from vllm_overlay.needs import Subject
from vllm_overlay.weights import weight_bytes


def subject_of(
    model: str, serve: Mapping[str, Any], env: Mapping[str, str], fixes: Sequence[Fix]
) -> Subject:
    """Return what the rules of ``fixes`` look at; only that is read which a rule asks for.

    ``model`` is a folder's path, or a hub id, of which nothing is known before the start. Raises
    ConfigError for a config.json or weights that cannot be read, and where the GPUs cannot be
    asked for.
    """
    kinds = {need.kind for fix in fixes for need in fix.needs}
    config: ModelConfig | None = None
    memory: KvMemory | None = None
    capability: str | None = None
    if kinds & {"config", "fits"} and Path(model).is_absolute():
        config = read_model_config(Path(model), serve.get("hf-overrides"))
    if "fits" in kinds and config is not None:
        found = gpus()
        capability = found[0].capability if found else None
        memory = room(Path(model), serve, found)
    return Subject(serve, env, config, memory, capability)


def count(serve: Mapping[str, Any], flag: str) -> int:
    """Return the whole number of a flag such as tensor-parallel-size; 1 where it says nothing."""
    try:
        return max(number(serve, flag) or 1, 1)
    except NotCoveredError:
        return 1  # vLLM's parser refuses the value


def rank_count(serve: Mapping[str, Any]) -> int:
    """Return the ranks that share the weights of one replica."""
    return count(serve, "tensor-parallel-size") * count(serve, "pipeline-parallel-size")


def room(folder: Path, serve: Mapping[str, Any], found: Sequence[Gpu]) -> KvMemory | None:
    """Return what one of the GPUs has for the KV cache; None where nothing tells.

    Raises ConfigError for weights that cannot be read.
    """
    try:
        pinned = kv_memory(serve, None, None)
    except NotCoveredError:
        return None  # vLLM's parser refuses the value
    if pinned is not None or not found or serve.get("load-format") == "dummy":
        return pinned
    least = min(host_memory() if gpu.memory is None else gpu.memory for gpu in found)
    return kv_memory(serve, least, weight_bytes(folder) // rank_count(serve))
