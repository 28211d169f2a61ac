"""What a verify that folds must leave alone, bit for bit, at any size and on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.support.kda_float64 import DIM, Case, Course
from tests.support.kda_forms import Ring, Verify, window_of
from vllm_overlay.kda.operands import Folds

BLOCKS, GAP, SPARE = 9, 64, 3  # blocks of the cache, elements between them, tokens of no row
OLD = 7.0


class Launch:
    """A verify of five rows, the second and fourth padded, in the middle of larger buffers.

    The last row's records go to the scratch row. ``pending``: tokens to fold, by row.
    """

    def __init__(
        self,
        *,
        unit: bool,
        state: torch.dtype,
        device: str,
        heads: int = 4,
        pending: tuple[int, ...] = (3, 0, 0, 0, 8),
        window: int = 8,
    ) -> None:
        case = Case(rows=5, steps=2, ragged=True, heads=heads, state=state, window=window)
        self.course = course = Course(case, device, seed=3)
        blocks = torch.tensor([5, 0, 8, -1, 2], dtype=torch.int32, device=device)
        self.live = torch.tensor([0, 2, 4], device=device)
        self.blocks = blocks[self.live].long()
        per_block = case.heads * DIM**2
        self.cache = torch.randn(BLOCKS, per_block + GAP, device=device).to(state)
        self.state = self.cache[:, :per_block].unflatten(1, (case.heads, DIM, DIM))
        self.state[self.blocks] = course.start[self.live]
        self.ring = Ring(course, unit=unit)
        for part in self.ring.data:
            part.copy_(torch.randn(part.shape, device=device))
        if unit:  # decays do not grow
            self.ring.records.gates.sigmoid_()
        self.write_rows = self.ring.rows[1].clone()
        self.write_rows[torch.tensor([1, 3, 4], device=device)] = -1
        lens = torch.tensor(pending, dtype=torch.int32, device=device)
        self.folds = Folds(lens, self.ring.rows[0])
        self.window = self._with_spare_tokens(window_of(course, 1, blocks))
        self.tokens = self.window.q.shape[1] - SPARE
        self.buffers = [self.cache, *self.ring.data]
        self.before = [part.clone() for part in self.buffers]

    def _with_spare_tokens(self, window: Any) -> Any:
        """Return the window with tokens behind the last row's, as a wider CUDA graph has them."""
        names = ("q", "k", "v", "gate", "beta")
        parts = {name: getattr(window, name) for name in names}
        return replace(
            window,
            **{name: torch.cat([part, part[:, :SPARE]], 1) for name, part in parts.items()},
        )

    def verify(self, verify: Verify) -> torch.Tensor:
        """Launch once on the buffers as they were at first; return the whole output."""
        for part, before in zip(self.buffers, self.before, strict=True):
            part.copy_(before)
        out = torch.full(self.window.v.shape, OLD, device=self.state.device)
        ring = self.ring
        verify(
            self.window, self.state, ring.records, self.write_rows, ring.scratch, self.folds, out
        )
        return out


def no_stray_write(verify: Verify, **layout: Any) -> None:
    """Only folded states, written record rows and the rows' own outputs change."""
    launch = Launch(**layout)
    out = launch.verify(verify)
    folded = launch.blocks[[0, 2]]
    for block in folded:
        moved = not torch.equal(launch.cache[block], launch.before[0][block])
        assert moved, f"block {int(block)} was not folded"
    allowed = launch.before[0].clone()
    allowed[folded, :-GAP] = launch.cache[folded, :-GAP]
    assert torch.equal(launch.cache, allowed), "a state changed that has nothing to fold"
    written = [int(launch.write_rows[0]), int(launch.write_rows[2]), launch.ring.scratch]
    for part, before in zip(launch.ring.data, launch.before[1:], strict=True):
        for row in written[:2]:
            assert not torch.equal(part[row], before[row]), f"record row {row} was not written"
        allowed = before.clone()
        allowed[written] = part[written]
        assert torch.equal(part, allowed), "a record row changed that is not this step's"
    start = launch.course.start_loc[1].tolist()
    assert not out.isnan().any()
    assert bool((out[:, launch.tokens :] == OLD).all()), "an output of no row was written"
    for row in range(5):
        own = out[:, start[row] : start[row + 1]]
        if row in (1, 3):
            assert not own.any(), "a padded row's outputs are not zero"
        else:
            assert bool((own != OLD).all()), "an output was not written"


def rows_are_apart(verify: Verify, **layout: Any) -> None:
    """A row has the same bits whatever the others are: here, all but the last become padded."""
    launch = Launch(**layout)
    out = launch.verify(verify)
    kept = launch.state[launch.blocks[2]].clone(), launch.ring.data[0][launch.ring.scratch].clone()
    launch.window.blocks[:4] = 0
    alone = launch.verify(verify)
    last = int(launch.course.start_loc[1][4])
    assert torch.equal(out[:, last:], alone[:, last:]), "outputs depend on other rows"
    assert torch.equal(kept[0], launch.state[launch.blocks[2]]), "states depend on other rows"
    assert torch.equal(kept[1], launch.ring.data[0][launch.ring.scratch])


def a_nan_stays(verify: Verify, **layout: Any) -> None:
    """A value whose state has lost its meaning says so; no other value does."""
    launch = Launch(**layout)
    block, head, value = int(launch.blocks[0]), 1, 70
    launch.state[block, head, value, 5] = float("nan")
    launch.before[0].copy_(launch.cache)
    out = launch.verify(verify)
    own = out[0, : int(launch.course.start_loc[1][1]), head]
    assert own[:, value].isnan().all(), "a NaN of the state is not in its value's outputs"
    assert launch.state[block, head, value].isnan().sum() == 1
    assert out.isnan().sum() == own[:, value].numel(), "a NaN spread to other values"


def a_long_row_is_cut(verify: Verify, **layout: Any) -> None:
    """A row of more tokens than its records have room for does not reach into other records."""
    launch = Launch(**layout, pending=(3, 0, 0, 0, 4), window=4)
    launch.window.start_loc[1] = 7
    launch.verify(verify)
    written = [int(launch.write_rows[0]), int(launch.write_rows[2]), launch.ring.scratch]
    for part, before in zip(launch.ring.data, launch.before[1:], strict=True):
        allowed = before.clone()
        allowed[written] = part[written]
        assert torch.equal(part, allowed), "a record row changed that is not this step's"


def replay_is_eager(verify: Verify, **layout: Any) -> None:
    """A captured CUDA graph gives the bits of the eager launch, also once its inputs changed."""
    launch = Launch(**layout)
    launch.verify(verify)
    ring, folds = launch.ring, launch.folds
    out = torch.full(launch.window.v.shape, OLD, device=launch.state.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify(
            launch.window, launch.state, ring.records, launch.write_rows, ring.scratch, folds, out
        )
    for pending in ((3, 0, 0, 0, 8), (0, 0, 5, 0, 1)):
        folds.lens.copy_(torch.tensor(pending))
        want = [launch.verify(verify), *(part.clone() for part in launch.buffers)]
        for part, before in zip(launch.buffers, launch.before, strict=True):
            part.copy_(before)
        out.fill_(OLD)
        graph.replay()
        for found, expected in zip((out, *launch.buffers), want, strict=True):
            assert torch.equal(found, expected), "a replay differs from an eager launch"


CHECKS: dict[str, Callable[..., None]] = {
    "no_stray_write": no_stray_write,
    "rows_are_apart": rows_are_apart,
    "a_nan_stays": a_nan_stays,
    "a_long_row_is_cut": a_long_row_is_cut,
    "replay_is_eager": replay_is_eager,
}
