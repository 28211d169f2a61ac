"""What RecoverSSM's metadata builder makes of unusual batches and configurations, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

# isort: off
from tests.support.glm_layer import Engine, Row, config, stand_in_for_prefill_kernels
import torch
from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointMetadata
from vllm.models.glm5next.common import model, recoverssm
# isort: on


def shown(metadata: Any) -> dict[str, Any]:
    commit = getattr(metadata, "recoverssm_commit", None)
    blocks = metadata.spec_state_indices_tensor
    return {
        "verifying": metadata.num_spec_decodes,
        "prefills": metadata.num_prefills,
        "blocks": None if blocks is None else blocks.flatten().tolist(),
        "start": None if blocks is None else metadata.spec_query_start_loc.tolist(),
        "commits": None if commit is None else commit.state_indices.tolist(),
    }


def regathered(engine: Engine, rows: list[Row], *, checkpoint: bool = False) -> list[str]:
    """Return what differs between a group's metadata that is built, and made of another's."""
    first, known = engine.metadata(rows), (engine.table, engine.builder)
    spec, names, config = (
        engine.builder.kv_cache_spec,
        engine.builder.layer_names,
        engine.builder.vllm_config,
    )
    alone, other = (type(known[1])(spec, names, config, torch.device("cpu")) for _ in range(2))
    engine.table, engine.builder = engine.table.flip(0), alone
    want, table = engine.metadata(rows), engine.table
    requests = [row.request for row in rows]
    if checkpoint:  # of each row, the state in its block goes to a prefix cache
        for made, blocks in ((first, known[0]), (want, table)):
            made.checkpoint = MambaPrefillCheckpointMetadata(
                torch.ones(len(rows), dtype=torch.int32),
                blocks[requests, 0],
                request_rows=torch.arange(len(rows)),
                block_cols=torch.zeros(len(rows), dtype=torch.int64),
            )
    engine.table, engine.builder = known
    got = other.update_block_table(first, table[requests], None)
    if hasattr(got, "recoverssm_context"):  # its records were never written: any bits, NaN too
        assert got.recoverssm_context is other._get_context()
        first.recoverssm_context = got.recoverssm_context = want.recoverssm_context = None
    assert not same(first, want)
    return [name for name in vars(want) if not same(getattr(want, name), getattr(got, name))]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, name), getattr(other, name)) for name in vars(one))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def refusals() -> dict[str, str]:
    """What `check_config` says of each configuration that the fix cannot serve."""

    def aligned(c: Any, block: int) -> None:
        c.cache_config.mamba_cache_mode, c.cache_config.mamba_block_size = "align", block

    changes: dict[str, Callable[[Any], None]] = {
        "as it is": lambda c: None,
        "align": lambda c: aligned(c, 4),
        "no drafts": lambda c: setattr(c, "num_speculative_tokens", 0),
        "V1 runner": lambda c: setattr(c, "use_v2_model_runner", False),
        "pipeline": lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2),
        "mode all": lambda c: setattr(c.cache_config, "mamba_cache_mode", "all"),
        "short block": lambda c: aligned(c, 3),
        "head dim": lambda c: setattr(c.model_config.hf_text_config, "linear_head_dim", 96),
    }
    said = {}
    for name, change in changes.items():
        changed = config({})
        change(changed)
        said[name] = _said(changed)
    hook = model.Glm5NextForConditionalGeneration.get_model_state_cls
    del model.Glm5NextForConditionalGeneration.get_model_state_cls
    said["no hook"] = _said(config({}))
    model.Glm5NextForConditionalGeneration.get_model_state_cls = hook
    return said


def _said(changed: Any) -> str:
    try:
        recoverssm.check_config(changed)
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    stand_in_for_prefill_kernels()
    engine = Engine()
    engine.layer.recoverssm_records.data.fill_(float("nan"))
    table = engine.table[:, 0].tolist()
    engine.computed[:] = 9
    found: dict[str, Any] = {
        "table": table,
        "longer than the window": shown(engine.metadata([Row(0, 5, 1)])),
        "padded": shown(engine.metadata([Row(0, 4, 1), Row(2, 2, 1), Row(1, 0), Row(3, 0)])),
        "mixed": shown(engine.metadata([Row(3, 5), Row(1, 3, 1)])),
        "one prompt token": shown(engine.metadata([Row(3, 1)])),
    }
    found["other groups"] = {
        "padded": regathered(engine, [Row(0, 4, 1), Row(2, 2, 1), Row(1, 0)]),
        "mixed": regathered(engine, [Row(3, 5), Row(1, 3, 1), Row(0, 2)]),
        "prefills": regathered(engine, [Row(3, 5), Row(1, 3)]),
        "checkpoints": regathered(engine, [Row(3, 5), Row(1, 3, 1)], checkpoint=True),
    }
    first = engine.builder._get_context()
    found["context kept"] = engine.builder._get_context() is first
    conv, state = engine.layer.kv_cache
    object.__setattr__(engine.layer, "kv_cache", (conv.clone(), state.clone()))
    found["context of a new cache"] = engine.builder._get_context() is not first
    engine.builder.mamba_aligned_state_indices = torch.tensor([[7], [8]], dtype=torch.int32)
    found["aligned"] = shown(engine.metadata([Row(0, 4, 1), Row(1, 4, 1)]))["commits"]
    found["refusals"] = refusals()
    classes = [model.Glm5NextForCausalLM, model.Glm5NextForConditionalGeneration]
    made = [cls.get_model_state_cls(SimpleNamespace()) for cls in classes]
    found["state"] = [cls.__mro__[1].__name__ for cls in made]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
