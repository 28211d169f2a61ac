"""What must hold of RecoverSSM's kernels, at any size and on any device; see ``kda.py``.

``python -m tests.support.kda_cases`` runs all at a small size and prints a JSON line for each.
"""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

# isort: off
from tests.support import interpreter  # before vLLM
import torch
from tests.support.kda import Rig, Shape, Step
from vllm.models.glm5next.common import recoverssm_commit
# isort: on

interpreter.rebind()


@dataclass(frozen=True)
class Size:
    """How large a case is; ``steps`` of each schedule."""

    heads: int = 2
    dim: int = 16
    rows: int = 3
    steps: int = 3
    device: str = "cpu"

    def shape(self, **changes: object) -> Shape:
        base = {"heads": self.heads, "dim": self.dim, "rows": self.rows, "device": self.device}
        return Shape(**{"window": 4, **base, **changes})  # type: ignore[arg-type]


def _schedule(rig: Rig, steps: int, seed: int, *, interleaved: bool = False) -> None:
    """Draft counts that change from step to step, rows without drafts, any acceptance."""
    draw = random.Random(seed)
    shape = rig.shape
    for number in range(steps):
        longest = shape.window if number == 0 else draw.randint(1, shape.window)
        windows = [draw.choice((longest, draw.randint(1, longest), 1)) for _ in range(shape.rows)]
        windows[0] = longest
        accepted = [draw.randint(0, window) for window in windows]
        if number == 0:  # all accepted, and none
            accepted[0], accepted[-1] = longest, 0
        rig.step(Step(windows, accepted, interleaved))


def _window(window: int) -> Callable[[Size], None]:
    return lambda size: _schedule(Rig(size.shape(window=window)), size.steps, window)


def bf16_state(size: Size) -> None:
    _schedule(Rig(size.shape(state=torch.bfloat16)), size.steps, 11)


def columns_first(size: Size) -> None:
    _schedule(Rig(size.shape(columns_first=True)), size.steps, 12)


def odd_strides(size: Size) -> None:
    """Tokens that lie at no multiple of 16: Triton's loads, and so its sums, are others."""
    _schedule(Rig(size.shape(pad=3)), size.steps, 15)


def interleaved(size: Size) -> None:
    _schedule(Rig(size.shape(block=8)), size.steps, 13, interleaved=True)


def padding_rows(size: Size) -> None:
    rig = Rig(size.shape())
    for accepted in (2, 4):
        rig.step(Step([4, *[0] * (size.rows - 1)], [accepted, *[0] * (size.rows - 1)]))


def layers_of_a_group(size: Size) -> None:
    _schedule(Rig(size.shape(layers=3, block=8)), size.steps, 14)


def _around(window: int, block: int) -> Callable[[Size], None]:
    """Acceptance that ends before, on and after a block's end, from every place before it."""

    def case(size: Size) -> None:
        for accepted in range(window + 1):
            rig = Rig(size.shape(window=window, block=block))
            rig.resume([block - 1 - row % block for row in range(size.rows)])
            rig.step(Step([window] * size.rows, [accepted] * size.rows))
            rig.step(Step([window] * size.rows, [window] * size.rows))

    return case


def null_blocks(size: Size) -> None:
    """Neither the block that is filled nor one that would take the state need be there."""
    for accepted in (4, 1, 2):  # past the lost block's end, within it, exactly to its end
        rig = Rig(size.shape(window=4, block=4))
        rig.resume([6] * size.rows)
        rig.step(Step([4] * size.rows, [accepted] * size.rows, lost=1))


def plan_integers(size: Size) -> None:
    """Which column, which block, how many tokens: no state involved."""
    for window in (1, 3, 8):
        for block in (window, window + 1, 16):
            _plan(size, window, block)


def _plan(size: Size, window: int, block: int) -> None:
    rows = [
        (computed, length, accepted)
        for computed in range(2 * block + 1)
        for length in (1, window)
        for accepted in {0, 1, length - 1, length, length + 3}
    ]
    columns = 4
    table = torch.arange(1, 1 + len(rows) * columns).view(-1, columns).int()
    table[::7, 1] = 0
    source = torch.tensor(
        [int(table[i, min((c + n - 1) // block, 3)]) for i, (c, n, _) in enumerate(rows)]
    )
    context = recoverssm_commit.Glm5NextRecoverSSMCommitContext(
        (),
        (),
        (),
        (),
        window,
        torch.full((len(rows), 5), -7, dtype=torch.int32, device=size.device),
    )
    to = size.device
    verified = recoverssm_commit.CommitRows(
        source.int().to(to),
        torch.tensor([0, *(n for _, n, _ in rows)]).cumsum(0).int().to(to),
        block_table=table.to(to),
        num_computed_tokens=torch.tensor([c for c, _, _ in rows]).int().to(to),
        mamba_block_size=block,
    )
    context.prepare(torch.tensor([a for _, _, a in rows]).int().to(to), verified)
    for (computed, length, accepted), blocks, begin, found in zip(
        rows, table.tolist(), source.tolist(), context.plan.tolist(), strict=True
    ):
        taken = max(0, min(accepted, length))
        final = blocks[max(computed + taken - 1, 0) // block]
        if begin == 0 or final == 0:
            assert found[0] == 0, (computed, length, accepted, found)
            continue
        assert found[:3] == [taken, begin, final], (computed, length, accepted, found)
        inside = [n for n in range(1, taken) if (computed + n) % block == 0]
        assert found[3] == (blocks[computed // block] if inside else 0), (computed, taken, found)
        assert not inside or found[4] == inside[0], (computed, taken, found)


def groups_commit_together(size: Size) -> None:
    """Two KV-cache groups in one table: the same as each by itself."""
    pairs = []
    for together in (False, True):
        rigs = [Rig(size.shape(block=8), seed) for seed in (1, 2)]
        rows = size.rows
        start = torch.arange(0, 4 * rows + 1, 4, dtype=torch.int32, device=size.device)
        accepted = torch.arange(rows, dtype=torch.int32, device=size.device) % 4 + 1
        zeros = torch.zeros(rows, dtype=torch.int32, device=size.device)
        # The groups' blocks lie in tables of other widths.
        rigs[1].table = torch.cat([rigs[1].table, rigs[1].table[:, :1]], 1)
        verified = []
        for rig in rigs:
            torch.manual_seed(3)
            blocks = rig.table[:, 0]
            rig.verify_all(start, blocks)
            verified.append(recoverssm_commit.CommitRows(blocks, start, None, rig.table, zeros, 8))
        contexts = [rig.context for rig in rigs]
        other = replace(verified[1], mamba_block_size=16)
        for unlike in (verified[:1], [verified[0], other]):
            try:
                recoverssm_commit.plan_commits(contexts, accepted, unlike)
            except ValueError as error:
                assert "differ in rows, block size or window" in str(error)
            else:
                raise AssertionError("no error")
        if together:
            recoverssm_commit.plan_commits(contexts, accepted, verified)
            recoverssm_commit.CommitTable.create(contexts).apply(rows)
        else:
            for context, each in zip(contexts, verified, strict=True):
                context.prepare(accepted, each)
                context.table.apply(rows)
        pairs.append([rig.ours[0].pages.clone() for rig in rigs])
    for apart, joined in zip(*pairs, strict=True):
        assert torch.equal(apart, joined)
    assert not torch.equal(pairs[0][0], pairs[0][1])


CASES: dict[str, Callable[[Size], None]] = {
    **{f"window_{window}": _window(window) for window in range(1, 9)},
    "bf16_state": bf16_state,
    "columns_first": columns_first,
    "odd_strides": odd_strides,
    "interleaved": interleaved,
    "padding_rows": padding_rows,
    "layers_of_a_group": layers_of_a_group,
    "around_a_block_of_the_window": _around(3, 3),
    "around_a_larger_block": _around(3, 8),
    "null_blocks": null_blocks,
    "plan_integers": plan_integers,
    "groups_commit_together": groups_commit_together,
}


def main() -> None:
    """Run all cases; a line of JSON for each: its name, and the traceback or nothing."""
    for name, case in CASES.items():
        try:
            case(Size())
            error = ""
        except Exception:
            error = traceback.format_exc()
        print(json.dumps([name, error]), flush=True)


if __name__ == "__main__":
    main()
