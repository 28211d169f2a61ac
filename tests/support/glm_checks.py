"""What tests/kernel asks of ``VLLM_GLM5NEXT_RECOVERSSM=fast``, beside the exact form.

``python -m tests.support.glm_checks NAME...``: each function runs in Triton's interpreter. The
mutants are the ways to break a rule that a schedule must notice.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.support import interpreter  # before vLLM

# isort: split
import torch
from vllm.models.glm5next.common import (
    recoverssm_commit,
    recoverssm_deferred,
    recoverssm_deferred_builder,
)

from tests.support import kda_rules as rules
from tests.support.glm_world import GlmWorld
from tests.support.kda_rules import one_step, prepared, same, states
from tests.support.kda_schedule import ALIGNED, ALWAYS, Schedule, drive
from tests.support.kda_world import Row, Sizes, World
from vllm_overlay.activate import current
from vllm_overlay.kda import folds, verify
from vllm_overlay.kda.chunk import verify_chunk
from vllm_overlay.kda.sequential import verify_sequential

WITHIN = 1e-5  # of states that single steps leave, whose values are around 1

interpreter.rebind()


def small(**changes: Any) -> Sizes:
    """Two value blocks a head."""
    return Sizes(
        **{"heads": 1, "head_dim": 32, "num_spec": 2, "block": 32, "columns": 8, **changes}
    )


def pair(sizes: Sizes) -> list[World]:
    return [GlmWorld(sizes, deferred=False), GlmWorld(sizes, deferred=True)]


def scheduled(sizes: Sizes, *, steps: int, seed: int) -> Schedule:
    """Drive both forms through a schedule whose fused verifies change between the two kernels."""
    used: Counter[Any] = Counter()

    def by_rows(rows: int, heads: int) -> Any:
        kernel = verify_chunk if rows > 2 else verify_sequential
        used[kernel] += 1
        return kernel

    with mock.patch.object(verify, "triton_form", by_rows):
        done = drive(pair(sizes), [False], steps=steps, seed=seed)
    assert len(used) == 2, used
    return done


def aligned_schedule() -> None:
    seen = scheduled(small(), steps=28, seed=3).seen
    assert not [kind for kind in ALIGNED if not seen[kind]], seen


def schedule_without_prefix_cache() -> None:
    free = small(mode="none", block=8, groups=1, dtype=torch.bfloat16, num_spec=3)
    seen = scheduled(free, steps=20, seed=3).seen
    assert not [kind for kind in ALWAYS if not seen[kind]], seen


def folds_happen_once() -> None:
    for layers in ({"groups": 2}, {"groups": 1, "layers": 2}):
        rules.folds_happen_once(pair(small(mode="none", **layers)), WITHIN)


def counts_are_set_and_cleared() -> None:
    rules.counts_are_set_and_cleared(pair(small(mode="none")), least=1)


def streamed_input() -> None:
    rules.streamed_input(pair(small(mode="none")), WITHIN)


def prefills_see_no_pending_tokens() -> None:
    """A row that has verified and now runs as a prefill: alone, and beside one that verifies."""
    for others in ([], [Row(1, 14, 3, 2)]):
        worlds = pair(small(mode="none"))
        inputs = prepared(worlds)
        first, again = inputs(6), inputs(4 + 3 * len(others))
        for world in worlds:
            one_step(world, [Row(0, 12, 3, 2), Row(1, 12, 3, 2)], first, [3, 2])
        before, deferring = states(worlds[1]), worlds[1].state.recoverssm
        for world in worlds:
            world.prepare(world.batch([Row(0, 15, 4, prefilling=True), *others]))
        assert deferring.owing.tolist() == [0]
        exact, deferred = map(states, worlds)
        for old, want, got in zip(before, exact, deferred, strict=True):
            assert not torch.equal(got[1], old[1])
            torch.testing.assert_close(got[1], want[1], rtol=0, atol=WITHIN)
            assert torch.equal(got[2], old[2])  # pending still: a verify folds it, or nobody
        for world in worlds:  # and is not folded again by the verify that comes after
            batch = world.batch([Row(0, 15, 4, prefilling=True), *others])
            world.verify(world.prepare(batch), again)
        assert deferring.owing is None  # and it does not try to
        last = inputs(6)
        rows = [Row(0, 19, 3, 2), Row(1, 14, 3, 2)]
        for number, world in enumerate(worlds):
            for layer, kept in zip(world.all_layers, (exact, deferred)[number], strict=True):
                layer.kv_cache[1][1].copy_(kept[1])
            one_step(world, rows, last, [1, 1])
        worlds[1].flush([0, 1], [1, 2])
        for want, got in zip(*map(states, worlds), strict=True):
            torch.testing.assert_close(got[1:3], want[1:3], rtol=0, atol=WITHIN)


def advance(world: World, computed: int) -> None:
    """Bring the request of slot 0 to ``computed`` tokens, and that of slot 1 to 48."""
    world.table[:2, 1] = torch.tensor([3, 4])
    for slot, length in ((0, computed), (1, 48)):
        world.state._mamba_state_idx_gpu[slot] = (length - 1) // 32
        world.computed[slot] = length


def eager_rows_commit_at_once() -> None:
    """Near a block's end the state is written as the exact form writes it, boundary included."""
    for computed, accepted in ((30, 3), (29, 3), (31, 1), (27, 0)):
        worlds = pair(small())
        inputs = prepared(worlds)
        tokens = inputs(6)
        for world in worlds:
            advance(world, computed)
            one_step(world, [Row(1, 48, 3, 2), Row(0, computed, 3, 2)], tokens, [2, accepted])
        assert worlds[1].state.recoverssm.pending.tolist()[:2] == [0, 2]
        for want, got in zip(*map(states, worlds), strict=True):
            for block in (1, 3):
                torch.testing.assert_close(got[block], want[block], rtol=0, atol=WITHIN)
            assert not torch.equal(got[4], want[4])  # the other row's tokens are pending
        if accepted and computed == 30:
            assert not same([got[1]], [got[3]])  # two blocks were written


def groups_alone() -> None:
    """A group's own commit does what the runner's hook does, one group after the other."""
    worlds = [GlmWorld(small(), deferred=True) for _ in range(2)]
    inputs = prepared(worlds)
    for computed, sampled in ((30, [3, 2]), (33, [1, 3])):
        tokens = inputs(6)
        for world, alone in zip(worlds, (False, True), strict=True):
            if computed == 30:
                advance(world, computed)
            batch = world.batch([Row(0, computed, 3, 2), Row(1, computed + 18, 3, 2)])
            world.start(batch)
            metadata = world.prepare(batch)
            world.verify(metadata, tokens)
            if alone:
                counts = torch.tensor(sampled, dtype=torch.int32)
                for name in ("0.0", "1.0"):
                    after = metadata[name].commit_recoverssm_state(counts)
                    assert after is not None and after.num_spec_decodes == 2
            else:
                world.finish(batch, sampled)
        if computed == 30:
            assert [each.state.recoverssm.pending.tolist() for each in worlds] == [[0, 2, 0, 0]] * 2
        one, other = (each.state.recoverssm for each in worlds)
        assert torch.equal(one.turn, other.turn) and torch.equal(one.pending, other.pending)
        assert same(*map(states, worlds))


def an_eager_fold_is_the_exact_form_s() -> None:
    """The exact form's kernel, over record rows: the same bits from the same records."""
    torch.manual_seed(0)
    made = [torch.randn(6, 1, 32, 32) for _ in range(2)]
    states_before = [state.clone() for state in made]
    records = [torch.randn(4 * 3, 3, 1, 32) for _ in range(2)]
    plan = torch.tensor([[3, 1, 2, 0, 0], [2, 4, 4, 5, 1]], dtype=torch.int32)
    moved = [torch.full_like(each, float("nan")) for each in records]
    for new, old in zip(moved, records, strict=True):
        new.view(4, -1)[[3, 1]] = old.view(4, -1)[[0, 1]]
    by_record = torch.full((4, 5), -1, dtype=torch.int32)
    by_record[[3, 1]] = plan
    results = []
    for data, rows, which in ((records, plan, None), (moved, by_record, torch.tensor([3, 1]))):
        folded = [state.clone() for state in states_before]
        context = recoverssm_commit.Glm5NextRecoverSSMCommitContext(
            (),
            tuple(torch.zeros(6, 1, 5) for _ in folded),
            tuple(folded),
            tuple(recoverssm_commit.Records(each, 4, 3) for each in data),
            3,
            rows,
        )
        context.table.fold(2, None if which is None else which.int())
        results.append(folded)
    assert same(*results) and not same(results[0], states_before)


def launches_do_not_grow_with_groups() -> None:
    """After sampling, with no row near a block's end, three Triton kernels run for any groups."""
    kernel, get = (
        type(recoverssm_commit.plan_kernel),
        type(recoverssm_commit.plan_kernel).__getitem__,
    )
    for groups in (1, 3):
        worlds = pair(small(mode="none", groups=groups))
        inputs = prepared(worlds)
        for world, last in zip(worlds, ("fold_kernel", "settle_kernel"), strict=True):
            batch = world.batch([Row(0, 12, 3, 2), Row(1, 12, 3, 2)])
            world.verify(world.prepare(batch), inputs(6))
            ran: Counter[str] = Counter()

            def counted(self: Any, grid: Any, ran: Counter[str] = ran) -> Any:
                ran[self.fn.__name__] += 1
                return get(self, grid)

            with mock.patch.object(kernel, "__getitem__", counted):
                world.finish(batch, [2, 1])
            del ran["_scatter_num_accepted_kernel"]  # vLLM's
            assert ran == dict.fromkeys(("plan_kernel", "compact_conv_kernel", last), 1), ran


def a_new_cache_is_followed() -> None:
    """A commit goes to the caches that the layers have now, for either form."""
    for deferred in (False, True):
        worlds = [GlmWorld(small(mode="none"), deferred=deferred) for _ in range(2)]
        inputs = prepared(worlds)
        for computed in (12, 15):
            tokens = inputs(6)
            for world, rebound in zip(worlds, (False, True), strict=True):
                rows = [Row(0, computed, 3, 2), Row(1, computed, 3, 2)]
                one_step(world, rows, tokens, [3, 3])
                if rebound:
                    for layer in world.all_layers:
                        conv, state = layer.kv_cache
                        object.__setattr__(layer, "kv_cache", (conv.clone(), state.clone()))
                        conv.fill_(float("nan"))
        for world in worlds:
            if deferred:
                world.flush([0, 1], [1, 2])
        assert same(*map(states, worlds))
        assert same(*([layer.kv_cache[0] for layer in world.all_layers] for world in worlds))


def the_receipt_says_which_kernel() -> None:
    plan = current()
    assert plan is not None
    plan.notes.clear()
    worlds = pair(small(mode="none"))
    inputs = prepared(worlds)
    for world, noted in zip(worlds, (False, True), strict=True):
        one_step(world, [Row(0, 12, 3, 2), Row(1, 12, 3, 2)], inputs(6), [1, 1])
        assert bool(plan.notes) is noted
    assert plan.notes["glm5next-recoverssm"]["kernel"].startswith("triton: ")


def too_many_rows() -> None:
    (world,) = pair(small(mode="none"))[1:]
    inputs = prepared([world])
    metadata = world.prepare(world.batch([Row(0, 12, 3, 2), Row(1, 12, 3, 2)]))["0.0"]
    metadata.deferred.blocks = torch.ones(5, dtype=torch.int32)
    try:
        world.run(world.all_layers[0], metadata, inputs(6)[0])
    except ValueError as error:
        assert "more rows verify" in str(error)
    else:
        raise AssertionError("no error")


# --- a schedule must notice each of these


def _kept_for_the_next_owner() -> Any:
    state = recoverssm_deferred.Glm5NextDeferredState
    return mock.patch.object(
        state, "add_request", lambda self, slot: self.verified.__setitem__(slot, False)
    )


def _folded_twice() -> Any:
    plan = folds.Ledger.plan

    def forgetful(self: folds.Ledger, *args: Any, **kwargs: Any) -> Any:
        self.folded.fill_(-1)
        return plan(self, *args, **kwargs)

    return mock.patch.object(folds.Ledger, "plan", forgetful)


def _one_half() -> Any:
    plan = folds.Ledger.plan

    def same_half(self: folds.Ledger, *args: Any, **kwargs: Any) -> Any:
        found = plan(self, *args, **kwargs)
        self.write_rows.copy_(found.rows)
        return found

    return mock.patch.object(folds.Ledger, "plan", same_half)


def _old_count_kept() -> Any:
    settle = folds.Ledger.settle

    def sticky(
        self: folds.Ledger, rows: Any, pending: torch.Tensor, *rest: Any, **more: Any
    ) -> None:
        before = pending.clone()
        settle(self, rows, pending, *rest, **more)
        pending.copy_(torch.where(pending == 0, before, pending))

    return mock.patch.object(folds.Ledger, "settle", sticky)


def _nothing_eager() -> Any:
    builder = recoverssm_deferred_builder.Glm5NextDeferredMetadataBuilder
    return mock.patch.object(builder, "_eager", lambda self, m, split: None)


def _warm_ups_own_slots() -> Any:
    return mock.patch.object(recoverssm_deferred_builder, "is_dummy", lambda batch: False)


def _blocks_of_the_first_group() -> Any:
    builder = recoverssm_deferred_builder.Glm5NextDeferredMetadataBuilder
    return mock.patch.object(builder, "update_block_table", lambda self, metadata, *rest: metadata)


MUTANTS: dict[str, Callable[[], Any]] = {
    mutant.__name__.strip("_"): mutant
    for mutant in (
        _kept_for_the_next_owner,
        _folded_twice,
        _one_half,
        _old_count_kept,
        _nothing_eager,
        _warm_ups_own_slots,
        _blocks_of_the_first_group,
    )
}


def noticed(name: str) -> None:
    """A schedule with a mutant must fail."""
    with MUTANTS[name]():
        try:
            scheduled(small(groups=2 if "group" in name else 1), steps=28, seed=3)
        except AssertionError:
            return
    raise AssertionError("the schedule has not noticed")


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        folds_happen_once,
        counts_are_set_and_cleared,
        streamed_input,
        prefills_see_no_pending_tokens,
        eager_rows_commit_at_once,
        groups_alone,
        an_eager_fold_is_the_exact_form_s,
        launches_do_not_grow_with_groups,
        a_new_cache_is_followed,
        the_receipt_says_which_kernel,
        too_many_rows,
        schedule_without_prefix_cache,
        aligned_schedule,
    )
} | {f"mutant_{name}": lambda name=name: noticed(name) for name in MUTANTS}


def main(names: list[str]) -> None:
    """Print a line of JSON for each case: its name, and the traceback if it failed."""
    for name in names:
        error = ""
        try:
            CASES[name]()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps([name, error]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
