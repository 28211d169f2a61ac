"""What holds of any deferred commit, each rule alone, beside a world that commits at once.

``worlds``: that one and the deferred one, of windows of three tokens, without prefix caching.
``within``: how far their states may differ, 0 for the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.kda_schedule import Schedule
from tests.support.kda_world import Row, World


def one_step(
    world: World, rows: list[Row], inputs: Any, accepted: list[int], times: int = 1
) -> Any:
    """Run a step whose forward runs ``times`` times from the same convolution states."""
    batch = world.batch(rows)
    world.start(batch)
    metadata = world.prepare(batch)
    kept = [layer.kv_cache[0].clone() for layer in world.all_layers]
    for _ in range(times):
        for layer, conv in zip(world.all_layers, kept, strict=True):
            layer.kv_cache[0].copy_(conv)
        outputs = world.verify(metadata, inputs)
    world.finish(batch, accepted)
    return outputs


def prepared(worlds: list[World]) -> Callable[[int], Any]:
    """Give each world the same caches and two requests; return a source of inputs."""
    sizes = worlds[0].sizes
    schedule = SimpleNamespace(sizes=sizes, make=torch.Generator().manual_seed(1), worlds=worlds)
    schedule.randn = lambda *shape: Schedule.randn(schedule, *shape)
    Schedule.noise(schedule)
    for world in worlds:
        for slot in range(2):
            world.table[slot, 0] = 1 + slot
            world.add_request(slot, 12)
    return lambda tokens: Schedule.inputs(schedule, tokens)


def states(world: World) -> list[torch.Tensor]:
    return [layer.kv_cache[1].clone() for layer in world.all_layers]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def folds_happen_once(worlds: list[World], within: float) -> None:
    """A repeated forward folds nothing more, nor does a flush after a fold, or a second flush."""
    inputs, (stock, world) = prepared(worlds), worlds
    for times, accepted in ((1, [2, 3]), (3, [0, 1]), (2, [3, 3])):
        rows = [Row(1, int(stock.computed[1]), 3, 2), Row(0, int(stock.computed[0]), 3, 2)]
        tokens = inputs(6)
        one_step(stock, rows, tokens, accepted)
        one_step(world, rows, tokens, accepted, times)
    assert world.state.recoverssm.pending.tolist()[:2] == [3, 3]
    unfolded = states(world)
    world.flush([0, 1], [1, 2])
    folded = states(world)
    assert not same(unfolded, folded)
    for got, want in zip(folded, states(stock), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=within)
    world.flush([0, 1], [1, 2])
    assert same(folded, states(world))
    assert world.state.recoverssm.pending.tolist()[:2] == [3, 3]  # other groups read it


def counts_are_set_and_cleared(worlds: list[World], least: int = 0) -> None:
    """A commit sets a count, also to 0; a new request clears its slot's and no other.

    ``least``: what a commit makes of a row that has sampled nothing.
    """
    inputs, (_, world) = prepared(worlds), worlds
    pending = world.state.recoverssm.pending
    for accepted in ([3, 2], [0, 1], [1, 0]):
        rows = [Row(0, int(world.computed[0]), 3, 2), Row(1, int(world.computed[1]), 3, 2)]
        one_step(world, rows, inputs(6), accepted)
        assert pending.tolist()[:2] == [max(count, least) for count in accepted]
    world.add_request(1, 12)
    assert pending.tolist()[:2] == [1, 0]
    world.add_request(0, 12)
    assert pending.tolist()[:2] == [0, 0]


def streamed_input(worlds: list[World], within: float) -> None:
    """A request that gets more input is removed and added again, and keeps its blocks."""
    inputs, (_, world) = prepared(worlds), worlds
    for each in worlds:
        each.add_request(0, 12, "session", [[1], [1]])
    rows, tokens = [Row(1, 12, 3, 2), Row(0, 12, 3, 2)], inputs(6)
    for each in worlds:
        one_step(each, rows, tokens, [2, 3])
        each.state.remove_request("session")
        each.add_request(3, 15, "session", [[1], [1]])
    for want, got in zip(*map(states, worlds), strict=True):
        torch.testing.assert_close(got[1], want[1], rtol=0, atol=within)
        assert not torch.equal(got[2], want[2])  # the other one's tokens are still pending
    assert world.state.recoverssm.pending.tolist()[1] == 2
