"""Drives stock KDA decoding and RecoverSSM's side by side, step by step, on any device.

Stock keeps the state after every token of a window, so that it is the reference for whatever part
of the window is accepted. Needs vLLM with the fix glm5next-recoverssm applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.models.glm5next.common import recoverssm_commit
from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent_kda

HISTORY = 3  # columns of the convolution's window
LOWER_BOUND = -5.0


@dataclass(frozen=True)
class Shape:
    """``rows`` requests; ``block`` is the align mode's block size in tokens, None outside it."""

    heads: int
    dim: int
    window: int
    rows: int
    layers: int = 1
    state: torch.dtype = torch.float32
    columns_first: bool = False  # convolution pages as [columns, channels]
    block: int | None = None
    pad: int = 0  # columns more than the layer's projection has: an odd token stride
    device: str = "cpu"

    @property
    def channels(self) -> int:
        return 3 * self.heads * self.dim


class Cache:
    """A layer's pages: the convolution state, then the recurrent state, as vLLM packs them."""

    def __init__(self, shape: Shape, blocks: int) -> None:
        columns = HISTORY + shape.window - 1
        conv_shape = (shape.channels, columns)
        if shape.columns_first:
            conv_shape = (columns, shape.channels)
        conv_bytes = 2 * columns * shape.channels
        state_bytes = shape.heads * shape.dim**2 * shape.state.itemsize
        self.pages = torch.zeros(
            (blocks, conv_bytes + state_bytes + 256), dtype=torch.int8, device=shape.device
        )
        conv = self.pages[:, :conv_bytes].view(torch.bfloat16).view(-1, *conv_shape)
        state = self.pages[:, conv_bytes : conv_bytes + state_bytes].view(shape.state)
        self.bound = (conv, state.view(-1, shape.heads, shape.dim, shape.dim))
        self.conv = conv.transpose(-1, -2) if shape.columns_first else conv
        self.state = self.bound[1]
        self.conv.copy_(torch.randn(self.conv.shape, device=shape.device))
        self.state.copy_(torch.randn(self.state.shape, device=shape.device))


@dataclass
class Step:
    """One step: per request, tokens in its window (0: it only pads) and how many are accepted."""

    windows: list[int]
    accepted: list[int]
    interleaved: bool = False  # requests that do not verify stand between those that do
    lost: int | None = None  # a column whose blocks are gone once the states were moved on


class Rig:
    """Requests with a state of their own in stock's caches and in the fix's."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.shape = shape
        recoverssm_commit.is_conv_state_dim_first = lambda: not shape.columns_first
        self.slots = torch.arange(1, 1 + shape.rows * shape.window, dtype=torch.int32)
        self.slots = self.slots.view(shape.rows, shape.window).to(shape.device)
        self.columns = 1 if shape.block is None else 64 // shape.block + 2
        blocks = 1 + torch.randperm(shape.rows * self.columns)
        self.table = blocks.view(shape.rows, self.columns).int().to(shape.device)
        self.stock = [Cache(shape, 1 + shape.rows * shape.window) for _ in range(shape.layers)]
        self.ours = [Cache(shape, 1 + shape.rows * self.columns) for _ in range(shape.layers)]
        self.weights = [_weights(shape) for _ in range(shape.layers)]
        self.last = [1] * shape.rows  # the column of stock's state, counted from 1
        sizes = (shape.rows, shape.heads, shape.dim, shape.window)
        self.records = [
            recoverssm_commit.allocate_records(*sizes, torch.float32, torch.device(shape.device))
            for _ in self.ours
        ]
        self.context = recoverssm_commit.Glm5NextRecoverSSMCommitContext.create(
            [
                SimpleNamespace(kv_cache=cache.bound, recoverssm_records=records)
                for cache, records in zip(self.ours, self.records, strict=True)
            ],
            spec_query_len=shape.window,
            max_num_reqs=shape.rows,
        )
        self.resume([0] * shape.rows)

    def resume(self, computed: list[int]) -> None:
        """Say how many tokens each request's state stands for."""
        self.computed = computed
        for row in range(self.shape.rows):
            self._copy_to_stock(row)

    def state_column(self, row: int) -> int:
        """The block column of a request's last committed token."""
        return 0 if self.shape.block is None else max(self.computed[row] - 1, 0) // self.shape.block

    def _copy_to_stock(self, row: int) -> None:
        block, slot = self.table[row, self.state_column(row)], self.slots[row, 0]
        for stock, ours in zip(self.stock, self.ours, strict=True):
            stock.state[slot] = ours.state[block]
            stock.conv[slot] = ours.conv[block]
        self.last[row] = 1

    def _move_states(self, windows: Sequence[int]) -> torch.Tensor:
        """Return the blocks that a step reads, its states moved there as vLLM's runner does."""
        blocks = []
        for row, window in enumerate(windows):
            if window == 0:  # the null block
                blocks.append(0)
                continue
            column = self.state_column(row)
            target = 0
            if self.shape.block is not None:
                target = max(self.computed[row] + window - 1, 0) // self.shape.block
            if target != column:
                for cache in self.ours:
                    cache.pages[self.table[row, target]] = cache.pages[self.table[row, column]]
            blocks.append(int(self.table[row, target]))
        return torch.tensor(blocks, dtype=torch.int32, device=self.shape.device)

    def step(self, step: Step) -> None:
        """Verify and commit in both; raises AssertionError at the first bit that differs."""
        blocks = self._move_states(step.windows)
        if step.lost is not None:
            self.table[:, step.lost] = 0
        start = torch.tensor([0, *step.windows], device=self.shape.device).cumsum(0).int()
        self.verify_all(start, blocks)
        self._commit(step, start, blocks)

    def verify_all(self, start: torch.Tensor, blocks: torch.Tensor) -> None:
        """Verify every layer's window in both; ``start`` and ``blocks`` as kernels want them."""
        for number in range(self.shape.layers):
            self._verify(number, start, blocks)

    def _verify(self, number: int, start: torch.Tensor, blocks: torch.Tensor) -> None:
        """Run one layer's window in both, on the same inputs."""
        shape, weights, records = self.shape, self.weights[number], self.records[number]
        tokens, rows = int(start[-1]), len(blocks)
        # Columns of one projection, as the layer passes them: q, k, v, beta and two more.
        width = shape.channels + shape.heads + 2 * shape.dim + shape.pad
        wide = torch.randn(tokens, width, device=shape.device).bfloat16()
        common = {
            "g": torch.randn(1, tokens, shape.heads, shape.dim, device=shape.device).bfloat16(),
            "beta": wide[None, :, shape.channels : shape.channels + shape.heads],
            "a_log": weights.a_log,
            "g_bias": weights.bias,
            "lower_bound": LOWER_BOUND,
        }
        slots = torch.where(blocks[:, None] > 0, self.slots[:rows], 0)
        last = torch.tensor(self.last[:rows], dtype=torch.int32, device=shape.device)
        stock, ours = self.stock[number], self.ours[number]
        qkv, out = self._convolved(stock, wide, weights, slots[:, 0], last, start)
        fused_recurrent_kda(
            **qkv,
            **common,
            out=out,
            initial_state=stock.state,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=start,
            ssm_state_indices=slots,
            num_accepted_tokens=last,
            sigmoid_beta=True,
            compute_gate=True,
        )
        ours_qkv, ours_out = self._convolved(
            ours, wide, weights, blocks, torch.ones_like(last), start
        )
        before = ours.state.clone()
        records.data.fill_(float("nan"))
        recoverssm_commit.kda_recoverssm_verify(
            **ours_qkv,
            **common,
            out=ours_out,
            checkpoint_state=ours.state,
            records=records,
            query_start_loc=start,
            state_indices=blocks,
        )
        assert torch.equal(before, ours.state), "the verify wrote a state"
        for name, part in qkv.items():
            assert torch.equal(part, ours_qkv[name]), f"the convolution of {name} differs"
        assert not out.isnan().any() and torch.equal(out, ours_out), "outputs differ"

    def _convolved(
        self,
        cache: Cache,
        wide: torch.Tensor,
        weights: SimpleNamespace,
        blocks: torch.Tensor,
        last: torch.Tensor,
        start: torch.Tensor,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return q, k, v as columns of one buffer, and an output buffer full of NaN."""
        mixed = causal_conv1d_update(
            wide.clone()[:, : self.shape.channels],
            cache.conv,
            weights.conv,
            None,
            activation="silu",
            conv_state_indices=blocks,
            num_accepted_tokens=last,
            query_start_loc=start,
            max_query_len=self.shape.window,
        )
        heads, dim = self.shape.heads, self.shape.dim
        parts = (part.view(1, -1, heads, dim) for part in mixed.split(heads * dim, dim=-1))
        out = torch.full((1, len(wide), heads, dim), float("nan"), device=wide.device)
        return dict(zip("qkv", parts, strict=True)), out.bfloat16()

    def _commit(self, step: Step, start: torch.Tensor, blocks: torch.Tensor) -> None:
        shape = self.shape
        rows = range(len(step.windows))
        place, batch = list(rows), len(rows)
        if step.interleaved:
            place, batch = [2 * row + 1 for row in rows], 2 * len(rows) + 1
        sampled = torch.full((batch,), 99, dtype=torch.int32)
        computed = torch.full((batch,), 5, dtype=torch.int32)
        table = torch.zeros((batch, self.columns), dtype=torch.int32)
        for row in rows:
            sampled[place[row]] = step.accepted[row]
            computed[place[row]] = self.computed[row]
            table[place[row]] = self.table[row].cpu()
        device = shape.device
        align = shape.block is not None
        expected = [(cache.conv.clone(), cache.state.clone()) for cache in self.ours]
        for row in rows:
            if blocks[row] > 0:
                self._expect(row, step.accepted[row], int(blocks[row]), expected)
        self.context.commit(
            sampled.to(device),
            blocks,
            start,
            request_indices=torch.tensor(place).int().to(device) if step.interleaved else None,
            block_table=table.to(device) if align else None,
            num_computed_tokens=computed.to(device) if align else None,
            mamba_block_size=shape.block,
        )
        for cache, (conv, state) in zip(self.ours, expected, strict=True):
            assert torch.equal(cache.state, state), "a committed state differs"
            assert torch.equal(cache.conv, conv), "a committed convolution differs"
        for row in rows:
            if blocks[row] <= 0:
                continue
            self.computed[row] += step.accepted[row]
            self.last[row] = step.accepted[row]
            if step.accepted[row] == 0:  # stock has no state before the window's first token
                self._copy_to_stock(row)

    def _expect(
        self,
        row: int,
        accepted: int,
        source: int,
        expected: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Write to ``expected`` what stock says of a row's accepted tokens."""
        targets = []
        block, computed = self.shape.block, self.computed[row]
        if block is None:
            targets.append((accepted, source))
        elif accepted and self.table[row, (computed + accepted - 1) // block] == 0:
            return  # nowhere to put the state: the row is left alone
        else:
            for length in range(1, accepted + 1):
                if (computed + length) % block == 0 or length == accepted:
                    column = (computed + length - 1) // block
                    targets.append((length, int(self.table[row, column])))
        for length, target in targets:
            if length == 0 or target == 0:
                continue
            for (conv, state), stock, ours in zip(expected, self.stock, self.ours, strict=True):
                state[target] = stock.state[self.slots[row, length - 1]]
                window = stock.conv[self.slots[row, 0]][:, length - 1 : length - 1 + HISTORY]
                assert torch.equal(
                    window, ours.conv[source][:, length - 1 : length - 1 + HISTORY]
                ), "convolution windows differ"
                conv[target][:, :HISTORY] = window


def _weights(shape: Shape) -> SimpleNamespace:
    device = shape.device
    return SimpleNamespace(
        conv=torch.randn(shape.channels, HISTORY + 1, device=device),
        a_log=torch.rand(1, 1, shape.heads, 1, device=device),
        bias=torch.rand(shape.heads * shape.dim, device=device),
    )
