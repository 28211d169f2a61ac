"""What tests/kernel asks of the deferred RecoverSSM; each function runs in Triton's interpreter."""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tests.support.interpreter  # noqa: F401 (before vLLM)

# isort: split
import torch
from vllm.models.kimi_k3.nvidia.specialized_decode.recoverssm import context, state

from tests.support import kda_rules as rules
from tests.support.kda_rules import one_step, prepared, states
from tests.support.kda_schedule import ALIGNED, ALWAYS, drive
from tests.support.kda_world import Row, Sizes, World
from tests.support.kimi_reference import FUSED, errors
from tests.support.kimi_world import KimiWorld
from vllm_overlay.kda import verify as folding

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "kda-deferred-2026-11-30-2.json"
KERNELS = {"sequential", "chunk"}


def small(**changes: Any) -> Sizes:
    """Two value blocks a head."""
    return Sizes(
        **{"heads": 1, "head_dim": 32, "num_spec": 2, "block": 32, "columns": 8, **changes}
    )


def aligned_schedule() -> None:
    """With a flush every bit is stock's; fused, every error is within the derived bound."""
    schedule(small(), ALIGNED, steps=24, seed=3)


def schedule_without_prefix_cache() -> None:
    free = small(mode="none", block=8, groups=1, dtype=torch.bfloat16, lower_bound=None)
    schedule(free, ALWAYS, steps=16, seed=3)


def schedule(sizes: Sizes, wanted: list[str], *, steps: int, seed: int) -> None:
    """Drive a long schedule whose fused verifies change between the two kernels."""
    used: Counter[Any] = Counter()

    def by_rows(rows: int, heads: int) -> Any:
        kernel = FUSED["chunk" if rows > 2 else "sequential"]
        used[kernel] += 1
        return kernel

    choose, folding.triton_form = folding.triton_form, by_rows
    try:
        worlds = [KimiWorld(sizes), KimiWorld(sizes, False), KimiWorld(sizes, True)]
        seen = drive([*worlds], [True, False], steps=steps, seed=seed).seen
    finally:
        folding.triton_form = choose
    assert not [kind for kind in wanted if not seen[kind]], seen
    assert len(used) == len(FUSED), used


def each_form() -> Iterator[tuple[list[World], float]]:
    """Yield a stock world beside one that flushes and one that fuses, and how far they may be."""
    for fused, within in ((False, 0.0), (True, 1e-5)):
        sizes = small(mode="none")
        yield [KimiWorld(sizes), KimiWorld(sizes, fused)], within


def folds_happen_once() -> None:
    for worlds, within in each_form():
        rules.folds_happen_once(worlds, within)


def counts_are_set_and_cleared() -> None:
    for worlds, _ in each_form():
        rules.counts_are_set_and_cleared(worlds)


def streamed_input() -> None:
    for worlds, within in each_form():
        rules.streamed_input(worlds, within)


def a_flush_writes_no_old_boundary() -> None:
    """What an eager commit has noted for a slot's last owner is not written by a later flush."""
    world = KimiWorld(small(), fused=False)
    inputs = prepared([world])
    world.table[:2, 1:] = torch.tensor([[3], [4]])
    one_step(world, [Row(0, 12, 3, 2), Row(1, 12, 3, 2)], inputs(6), [2, 3])
    for groups in world.attn_groups:
        made = groups[0].get_metadata_builder(0).recoverssm_context
        made.ledger.due.boundaries.fill_(9)
        made.ledger.due.boundary_lens.fill_(1)
    before = states(world)
    world.flush([0, 1], [1, 2])
    for old, new in zip(before, states(world), strict=True):
        assert not torch.equal(old[1:3], new[1:3])
        assert torch.equal(old[9], new[9])


def installing() -> None:
    """Twice is as good as once; without RecoverSSM and for CuTe layers nothing changes."""
    world = KimiWorld(small(), fused=True)
    (builder,) = (group[0].get_metadata_builder(0) for group in world.attn_groups[:1])
    world.state.recoverssm.bind(world.attn_groups, None)
    before = (world.state.prepare_attn, builder.build, world.all_layers[0].recoverssm_records)
    state.install_model_state(world.state)
    state.install_layers([SimpleNamespace(self_attn=layer) for layer in world.all_layers])
    state.install_builder(builder, world.state.recoverssm.pending)
    after = (world.state.prepare_attn, builder.build, world.all_layers[0].recoverssm_records)
    assert all(a is b for a, b in zip(before, after, strict=True))

    plain = SimpleNamespace(recoverssm=None)
    state.install_model_state(plain)
    assert vars(plain) == {"recoverssm": None}
    cute, other = KimiWorld(small()).all_layers[0], SimpleNamespace(self_attn=SimpleNamespace())
    cute.recoverssm_backend = "cute"
    kept = copy.copy(vars(cute))
    state.install_layers([SimpleNamespace(self_attn=cute), other, SimpleNamespace()])
    assert vars(cute) == kept


def kernels_by_size() -> None:
    """At each size measured with fp32 states, the kernel that was the faster, or as fast."""
    steps: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in json.loads(MEASURED.read_text())["rows"]:
        size = (row["requests"], row["heads"], row["window"])
        if row["dtype"] == "fp32":
            steps.setdefault(size, {})[row["method"]] = row["step"]
    both = {size: taken for size, taken in steps.items() if taken.keys() >= KERNELS}
    assert len(both) == 20
    for (requests, heads, _), taken in both.items():
        best = min(taken[name] for name in KERNELS)
        fast = [FUSED[name] for name in KERNELS if taken[name] < 1.01 * best]
        assert folding.triton_form(requests, heads) in fast


def records_come_first() -> None:
    """A commit context that would take the stock records' addresses is refused."""
    layer = KimiWorld(small()).all_layers[0]
    layer.dt_bias = layer.dt_bias
    try:
        context.KDADeferredCommitContext.create([layer], spec_query_len=3, max_num_reqs=4)
    except ValueError as error:
        assert "install_layers must come before the context" in str(error)
    else:
        raise AssertionError("no error")


def against_float64() -> None:
    found = errors(heads=1, requests=3, window=3, seed=1, device="cpu")
    for kernel in FUSED:
        for what, error in found[kernel].items():
            assert error <= 2 * found["stock"][what], json.dumps(found)


CASES = (
    kernels_by_size,
    folds_happen_once,
    a_flush_writes_no_old_boundary,
    counts_are_set_and_cleared,
    streamed_input,
    installing,
    records_come_first,
    against_float64,
    schedule_without_prefix_cache,
    aligned_schedule,
)


def main() -> None:
    """Print a line of JSON for each case: its name, and the traceback if it failed."""
    for case in CASES:
        error = ""
        try:
            case()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps([case.__name__, error]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
