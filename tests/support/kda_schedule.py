"""A random scheduler that drives a world that commits at once and deferred ones side by side.

Requests come into recycled slots, hit cached prefixes, are preempted and resumed, finish with
tokens pending, sit steps out, change rows and draft lengths, and stop on block boundaries;
prefills, captured graphs with padded rows, warm-ups and flushes at any time lie between.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.support.kda_compare import Comparison, Graph
from tests.support.kda_world import CONV, Row, Sizes, World

# What a long schedule must have met at least once.
ALWAYS = [
    "all accepted",
    "finished pending",
    "no speculative rows",
    "padded graph",
    "preempted with tokens pending",
    "prefills between verifies",
    "recycled slot with tokens pending",
    "resumed",
    "short window",
    "warm-up",
    "zero accepted",
]
ALIGNED = [*ALWAYS, "ends on a boundary", "prefix-cache hit"]


@dataclass
class Request:
    """A request in a slot. ``columns``: its state blocks, 0 where there is none."""

    name: int
    prompt: int
    slot: int
    computed: int
    columns: list[int]

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prompt


@dataclass
class Schedule:
    """``worlds[0]`` commits at once; ``comparisons`` say how close each other one must be."""

    sizes: Sizes
    worlds: list[World]
    comparisons: list[Comparison]
    seed: int
    live: dict[int, Request] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.make = torch.Generator().manual_seed(self.seed)
        self.dummies = list(range(1, 1 + self.sizes.slots))  # the blocks of warm-ups
        self.free = list(range(self.sizes.blocks - 1, self.sizes.slots, -1))
        self.cached: dict[int, int] = {}  # block: tokens before its end
        self.names = iter(range(1 << 30))
        self.captured = [self.capture(world) for world in self.worlds]
        self.noise()
        graph = self.sizes.device == "cuda"
        self.graphs = [
            Graph(world, metadata, self.inputs(self.sizes.slots * self.sizes.window))
            for world, metadata in zip(self.worlds if graph else [], self.captured, strict=False)
        ]

    def noise(self) -> None:
        """Fill the caches: a block holds what its last owner left."""
        for index, layer in enumerate(self.worlds[0].all_layers):
            for part, cache in enumerate(layer.kv_cache):
                cache.copy_(torch.randn(cache.shape, generator=self.make))
                for world in self.worlds[1:]:
                    world.all_layers[index].kv_cache[part].copy_(cache)

    def randn(self, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=self.make)
        return values.to(self.sizes.device, self.sizes.activation)

    def inputs(self, tokens: int) -> list[tuple[torch.Tensor, ...]]:
        s = self.sizes
        return [
            (
                self.randn(tokens, 3 * s.projection),
                self.randn(1, tokens, s.heads, s.head_dim),
                self.randn(1, tokens, s.heads),
            )
            for _ in self.worlds[0].all_layers
        ]

    # --- what happens between steps

    def capture(self, world: World) -> Any:
        """Build the metadata that a FULL graph of the greatest batch is captured with."""
        rows = [Row(slot, 0, self.sizes.window, self.sizes.num_spec) for slot in self.slots()]
        batch = world.batch(rows)
        batch.prefill_len_np[:] = 0
        return world.prepare(batch, for_capture=True)

    def slots(self) -> range:
        return range(self.sizes.slots)

    def warm_up(self) -> None:
        """Run dummy rows on blocks of their own, under the slots of live requests."""
        rows = [Row(slot, 0, self.sizes.window) for slot in self.slots()]
        inputs = self.inputs(sum(row.query for row in rows))
        for world in self.worlds[1:]:
            before = self.fingerprint(world)
            batch = world.batch(rows)
            batch.prefill_len_np[:] = 0
            world.input_table[:] = torch.tensor(self.dummies)[:, None]
            world.verify(world.prepare(batch), inputs)
            after = self.fingerprint(world)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        self.seen["warm-up"] += 1

    def fingerprint(self, world: World) -> list[torch.Tensor]:
        """Everything that a forward of dummy rows must leave alone."""
        own = 1 + self.sizes.slots
        parts = [cache[own:].clone() for layer in world.all_layers for cache in layer.kv_cache]
        for layer in world.all_layers:
            for records in world.records(layer):
                parts.append(records.unflatten(0, (-1, own))[:, :-1].nan_to_num())
        return [*parts, world.state.recoverssm.pending.clone()]

    def finish(self, request: Request, *, preempt: bool = False) -> None:
        """Take a request out. Its passed blocks may stay cached; the others are reused first."""
        del self.live[request.slot]
        for world in self.worlds:
            world.state.remove_request(str(request.name))
        for column, block in enumerate(request.columns):
            end = (column + 1) * self.sizes.block
            if not block or block in self.cached:
                continue
            if (
                self.sizes.mode == "align"
                and end <= request.computed
                and self.random.random() < 0.7
            ):
                self.cached[block] = end
            else:
                self.free.append(block)
        if preempt:
            self.preempted.append(request.computed + 1)
        if self.pending(request.slot):
            self.seen["preempted with tokens pending" if preempt else "finished pending"] += 1

    def pending(self, slot: int) -> int:
        return int(self.worlds[-1].state.recoverssm.pending[slot])

    def add(self, slot: int) -> None:
        prompt, computed, columns = self.random.randint(1, 2 * self.sizes.block), 0, []
        if self.preempted and self.random.random() < 0.7:
            prompt = self.preempted.pop()
            self.seen["resumed"] += 1
        if self.pending(slot):
            self.seen["recycled slot with tokens pending"] += 1
        hits = self.hits()
        if hits and self.random.random() < 0.6:
            block, computed = self.random.choice(hits)
            self.compare_block(block, "a prefix-cache hit")
            self.cached[block] = computed  # shared from now on
            columns = [0] * (computed // self.sizes.block - 1) + [block]
            prompt = computed + self.random.randint(1, self.sizes.block)
            self.seen["prefix-cache hit"] += 1
        name = next(self.names)
        self.live[slot] = Request(name, prompt, slot, computed, columns)
        for world in self.worlds:
            world.add_request(slot, computed, str(name))

    def hits(self) -> list[tuple[int, int]]:
        """Return (block, tokens) of each state that a prefix cache could give out now."""
        found = list(self.cached.items()) if self.sizes.mode == "align" else []
        for request in self.live.values() if self.sizes.mode == "align" else ():
            for column, block in enumerate(request.columns):
                end = (column + 1) * self.sizes.block
                if block and end <= request.computed:
                    found.append((block, end))
        limit = (self.sizes.columns - 4) * self.sizes.block
        return [(block, end) for block, end in found if end <= limit]

    # --- one step

    def step(self) -> None:
        roll = self.random.random
        for request in list(self.live.values()):
            too_long = request.computed + 3 * self.sizes.block > self.limit()
            if too_long or roll() < 0.06:
                self.finish(request)
            elif roll() < 0.04:
                self.finish(request, preempt=True)
        for slot in self.slots():
            if slot not in self.live and (roll() < 0.6 or not self.live):
                self.add(slot)
        if roll() < 0.15:
            self.warm_up()
        requests = [request for request in self.live.values() if roll() < 0.8]
        if roll() < 0.1 and any(request.prefilling for request in requests):
            requests = [request for request in requests if request.prefilling]
        self.random.shuffle(requests)
        if requests:
            self.run(requests)
        if roll() < 0.3:
            self.flush_and_compare()

    def limit(self) -> int:
        return self.sizes.columns * self.sizes.block

    def row(self, request: Request) -> Row:
        if request.prefilling:
            left = request.prompt - request.computed
            chunk = min(left, self.random.randint(1, self.sizes.block))
            return Row(request.slot, request.computed, chunk, prefilling=True)
        drafts = self.random.choice(
            [self.sizes.num_spec, self.random.randint(0, self.sizes.num_spec)]
        )
        unseen = self.random.randint(0, self.sizes.window)
        return Row(request.slot, request.computed, 1 + drafts, drafts, unseen=unseen)

    def run(self, requests: list[Request]) -> None:
        rows = [self.row(request) for request in requests]
        for request, row in zip(requests, rows, strict=True):
            self.allocate(request, row)
        decodes = [not row.prefilling for row in rows]
        padded = self.sizes.slots if all(decodes) and self.random.random() < 0.5 else None
        self.count_kinds(rows, decodes, padded)
        accepted = [self.accept(row) for row in rows]
        inputs = self.inputs(self.sizes.slots * self.sizes.window + sum(row.query for row in rows))
        results = [
            self.forward(index, rows, requests, accepted, inputs, padded)
            for index in range(len(self.worlds))
        ]
        for comparison, outputs in zip(self.comparisons, results[1:], strict=True):
            comparison.tokens += self.sizes.window
            for want, got in zip(results[0], outputs, strict=True):
                if want is not None:
                    comparison.close(want, got, "outputs")
        for request, row, count in zip(requests, rows, accepted, strict=True):
            request.computed += row.query if row.prefilling else count

    def count_kinds(self, rows: list[Row], decodes: list[bool], padded: int | None) -> None:
        self.seen["steps"] += 1
        self.seen["no speculative rows"] += not any(decodes)
        self.seen["prefills between verifies"] += any(decodes) and not all(decodes)
        self.seen["padded graph"] += padded is not None and padded > len(rows)
        self.seen["short window"] += any(0 < row.query < self.sizes.window for row in rows)

    def allocate(self, request: Request, row: Row) -> None:
        if self.sizes.mode == "none":
            needed = 1
        else:
            needed = (row.computed + row.query - 1) // self.sizes.block + 1
        while len(request.columns) < needed:
            if not self.free:
                self.evict()
            request.columns.append(self.free.pop())
        line = torch.zeros(self.sizes.columns, dtype=torch.int32)
        line[: len(request.columns)] = torch.tensor(request.columns, dtype=torch.int32)
        for world in self.worlds:
            world.table[request.slot] = line.to(self.sizes.device)

    def evict(self) -> None:
        used = {block for request in self.live.values() for block in request.columns}
        for block in [block for block in self.cached if block not in used]:
            del self.cached[block]
            self.free.append(block)

    def accept(self, row: Row) -> int:
        """Return how many tokens a row samples."""
        if row.prefilling:
            return int(row.computed + row.query == self.live[row.slot].prompt)
        to_boundary = -row.computed % self.sizes.block
        if 0 < to_boundary <= row.query and self.random.random() < 0.5:
            self.seen["ends on a boundary"] += 1
            return to_boundary
        kind = self.random.random()
        count = 0 if kind < 0.1 else row.query if kind < 0.4 else self.random.randint(1, row.query)
        self.seen["zero accepted"] += count == 0
        self.seen["all accepted"] += count == self.sizes.window
        return count

    def forward(
        self,
        index: int,
        rows: list[Row],
        requests: list[Request],
        accepted: list[int],
        inputs: list[tuple[torch.Tensor, ...]],
        padded: int | None,
    ) -> list[torch.Tensor | None]:
        """Run one world's step; return the outputs of the tokens that were verified."""
        world = self.worlds[index]
        batch = world.batch(rows, padded)
        world.start(batch)
        metadata = world.prepare(batch, full=padded is not None)
        if padded is not None and self.graphs:
            outputs = self.graphs[index](inputs)
        else:
            ran = self.captured[index] if padded is not None else metadata
            outputs = world.verify(ran, inputs)
        verified = sum(row.query for row in rows if not row.prefilling)
        for request, row in zip(requests, rows, strict=True):
            if row.prefilling:
                self.prefill(world, request, row)
        advanced = [
            row.query if row.prefilling else count
            for row, count in zip(rows, accepted, strict=True)
        ]
        world.finish(batch, accepted, advanced)
        return [out if out is None else out[:, :verified].float() for out in outputs]

    def prefill(self, world: World, request: Request, row: Row) -> None:
        """Leave a state where a prefill would: at each boundary and at the end of its chunk."""
        end = row.computed + row.query
        size = self.sizes.block
        marks = {end}
        if self.sizes.mode == "align":
            marks |= {mark for mark in range(size, end, size) if mark > row.computed}
        for mark in marks:
            column = (mark - 1) // size if self.sizes.mode == "align" else 0
            for number, layer in enumerate(world.all_layers):
                make = torch.Generator().manual_seed(hash((request.name, mark, number)))
                block = world.at(number, request.columns[column])
                conv, state = (cache[block] for cache in layer.kv_cache)
                history = torch.randn((CONV - 1, conv.shape[1]), generator=make)
                conv[: CONV - 1].copy_(history)
                state.copy_(torch.randn(state.shape, generator=make))

    # --- comparing

    def running(self, request: Request) -> int:
        column = (request.computed - 1) // self.sizes.block if self.sizes.mode == "align" else 0
        return request.columns[column]

    def flush_and_compare(self) -> None:
        """Fold what is pending, compare every state that is worth something, make them equal.

        A verify must not fold again what a flush has folded, so the schedule goes on from here.
        """
        decoding = [r for r in self.live.values() if not r.prefilling and r.columns]
        for world in self.worlds[1:]:
            if decoding:
                world.flush([r.slot for r in decoding], [self.running(r) for r in decoding])
        for request in decoding:
            self.compare_block(self.running(request), "a running state")
        for block, _ in self.hits():
            self.compare_block(block, "a cached state")
        for world in self.worlds[1:]:
            for layer, stock in zip(world.all_layers, self.worlds[0].all_layers, strict=True):
                layer.kv_cache[1].copy_(stock.kv_cache[1])
        for comparison in self.comparisons:
            comparison.tokens = 0
        self.seen["flush"] += 1

    def compare_block(self, block: int, what: str) -> None:
        for comparison, world in zip(self.comparisons, self.worlds[1:], strict=True):
            pairs = zip(self.worlds[0].all_layers, world.all_layers, strict=True)
            for number, pair in enumerate(pairs):
                at = world.at(number, block)
                history = [layer.kv_cache[0][at, : CONV - 1] for layer in pair]
                assert torch.equal(*history), f"{what}: another convolution state"
                want, got = (layer.kv_cache[1][at].float() for layer in pair)
                comparison.close(want, got, what)


def drive(worlds: list[World], exact: list[bool], *, steps: int, seed: int) -> Schedule:
    """Drive a world that commits at once and deferred ones through random steps.

    ``exact``: for each of the others, whether it must have the same bits.
    """
    torch.manual_seed(seed)
    np.random.seed(seed)
    sizes = worlds[0].sizes
    comparisons = [Comparison(sizes, exact=each) for each in exact]
    schedule = Schedule(sizes, worlds, comparisons, seed)
    for _ in range(steps):
        schedule.step()
    schedule.flush_and_compare()
    return schedule
