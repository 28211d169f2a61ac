"""The shared KDA verify that folds, against the recurrence in float64, at any size on any device.

A ``Trial`` makes the operands of one verify in buffers that are NaN wherever nothing is to be read,
runs a form of it, and compares every element that any buffer has.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from tests.support.interpreter import INTERPRETING
from vllm_overlay.kda.operands import Folds, Records, Window
from vllm_overlay.kda.verify import Verify

BF16 = 2.0 ** (-7 if INTERPRETING else -8)  # a rounding; Triton's interpreter cuts off


@dataclass(frozen=True)
class Shape:
    """How large a verify is, and of which kinds its operands are."""

    size: int  # of a window
    unit: bool
    lower_bound: float | None
    state: torch.dtype = torch.float32
    activation: torch.dtype = torch.float32
    heads: int = 2
    keys: int = 16
    values: int = 32
    rows: int = 6
    device: str = "cpu"


class Trial:
    """One verify's operands: the last row but one is padded by block 0, the last by block -1."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.draw = shape, random.Random(seed)
        torch.manual_seed(seed)
        s, n = shape, shape.rows
        self.lengths = [s.size, *(self.draw.randint(0, s.size) for _ in range(n - 1))]
        self.due = [s.size, 0, *(self.draw.randint(0, s.size) for _ in range(n - 2))]
        places = self.draw.sample(range(2 * n + 1), 2 * n)
        self.write, self.read = places[:n], places[n:]
        self.scratch = 2 * n + 1
        self.blocks = [*self.draw.sample(range(1, n + 2), n - 2), 0, -1]
        self.buffers: list[torch.Tensor] = []
        self.window = self._window()
        self.state = torch.randn(n + 2, s.heads, s.values, s.keys).to(s.device, s.state)
        self.buffers.append(self.state)
        self.records = self._records()
        self.out = self._wide(s.values)
        lines = torch.tensor([*self.write, 7]), torch.tensor(self.due), torch.tensor(self.read)
        given = [line.to(s.device, torch.int32) for line in lines]
        given[0][2] = -1
        self.write[2] = self.scratch
        self.write_rows, self.folds = given[0], Folds(given[1], given[2])

    def _wide(self, size: int) -> torch.Tensor:
        """A part [1, tokens, heads, size] of NaN, in a buffer of an odd width of its own."""
        s = self.shape
        width = s.heads * size + 5 + 2 * len(self.buffers)
        wide = torch.full((1, s.rows * s.size, width), float("nan"))
        wide = wide.to(s.device, s.activation)
        self.buffers.append(wide)
        return wide[..., 3 : 3 + s.heads * size].unflatten(2, (s.heads, size))

    def _window(self) -> Window:
        s = self.shape
        starts = [sum(self.lengths[:row]) for row in range(s.rows + 1)]
        parts = [self._wide(size) for size in (s.keys, s.keys, s.values, s.keys, 1)]
        for part in parts:
            part[:, : starts[-1]] = torch.randn(1, starts[-1], *part.shape[2:]).to(part)
        table = torch.full((s.rows, 3), -5, dtype=torch.int32, device=s.device)
        table[:, 1] = torch.tensor(self.blocks)
        return Window(
            *parts[:4],
            parts[4].squeeze(3),
            a_log=(torch.rand(s.heads) - 1).to(s.device),
            gate_bias=torch.randn(s.heads * s.keys).to(s.device),
            lower_bound=s.lower_bound,
            start_loc=torch.tensor(starts, dtype=torch.int32, device=s.device),
            blocks=table[:, 1],
            size=s.size,
        )

    def _records(self) -> Records:
        """Records as the fixes lay them out; those of no pending token are NaN."""
        s, rows = self.shape, 2 * self.shape.rows + 2
        inner = (rows, s.heads, s.size)
        if s.unit:  # a token's in one piece, heads inside
            shape = (rows, s.size, 3, s.heads, s.keys)
            kept = torch.full(shape, float("nan"), device=s.device).transpose(1, 3)
            keys, gates = kept[:, :, 0], kept[:, :, 1]
            corrections = torch.full((rows, s.size, s.heads, s.values), float("nan"))
            corrections = corrections.to(s.device).transpose(1, 2)
        else:
            both = torch.full((*inner, 2 * s.keys), float("nan"), dtype=s.activation)
            keys, gates = both.to(s.device).chunk(2, dim=-1)
            corrections = torch.full((*inner, s.values), float("nan"), device=s.device)
        self.buffers += [corrections, keys, gates]
        for row, due in zip(self.read, self.due, strict=True):
            size = (s.heads, due)
            key, gate = torch.randn(*size, s.keys).double(), torch.randn(*size, s.keys).double()
            if s.unit:
                key, gate = unit(key), torch.rand(*size, s.keys)
            keys[row, :, :due], gates[row, :, :due] = key.to(keys), gate.to(gates)
            corrections[row, :, :due] = torch.randn(*size, s.values).to(corrections)
        return Records(corrections, keys, gates, s.unit)

    def run(self, verify: Verify) -> Errors:
        """Run ``verify`` and compare; AssertionError where anything else has changed."""
        before = [buffer.clone() for buffer in self.buffers]
        state = self.state.clone()
        rest = (self.write_rows, self.scratch, self.folds, self.out)
        assert verify(self.window, self.state, self.records, *rest) is self.out
        errors = Errors()
        for row, block in enumerate(self.blocks):
            if block > 0:
                self._compare(row, state[block].double(), errors)
        self._untouched(before)
        return errors

    def _compare(self, row: int, state: torch.Tensor, errors: Errors) -> None:
        """Compare one row's state, outputs and records; then take them for expected."""
        w, records, s = self.window, self.records, self.shape
        due, read, write = self.due[row], self.read[row], self.write[row]
        for t in range(due):
            key, gate = records.keys[read, :, t].double(), records.gates[read, :, t].double()
            if not s.unit:
                key, gate = unit(key), self._decay(gate)
            u = records.corrections[read, :, t].double()
            state = state * gate[:, None] + u[..., None] * key[:, None]
        stored = self.state[self.blocks[row]].double()
        errors.note("state", stored, state, s.state)
        state = stored  # the window is verified from what the checkpoint holds
        for t in range(self.lengths[row]):
            token = int(w.start_loc[row]) + t
            q, k, v, g, beta = (part[0, token].double() for part in (w.q, w.k, w.v, w.gate, w.beta))
            key, decay = unit(k), self._decay(g)
            state = state * decay[:, None]
            u = (v - (state * key[:, None]).sum(-1)) * torch.sigmoid(beta)[:, None]
            state = state + u[..., None] * key[:, None]
            out = (state * unit(q)[:, None]).sum(-1) * s.keys**-0.5
            # A query may meet little of a state, so that the terms of its sum cancel.
            size = state.flatten(1).norm(dim=-1) * s.keys**-0.5
            errors.note("outputs", self.out[0, token].double(), out, s.activation, size)
            errors.note("corrections", records.corrections[write, :, t].double(), u)
            kept = records.keys[write, :, t].double(), records.gates[write, :, t].double()
            if s.unit:
                errors.note("keys", kept[0], key)
                errors.note("decays", kept[1], decay)
            else:
                assert torch.equal(kept[0], k)
                assert torch.equal(kept[1], g)

    def _decay(self, logit: torch.Tensor) -> torch.Tensor:
        w = self.window
        rate = w.a_log.double().exp()[:, None]
        x = logit + w.gate_bias.double().unflatten(0, (-1, self.shape.keys))
        if w.lower_bound is None:
            return (-rate * torch.nn.functional.softplus(x)).exp()
        return (w.lower_bound * torch.sigmoid(rate * x)).exp()

    def _untouched(self, before: list[torch.Tensor]) -> None:
        """Put back what may have changed, zeros in padded rows' outputs: all is as it was."""
        changed = [buffer.clone() for buffer in self.buffers]
        *_, state, corrections, keys, gates, out = range(len(before))
        heads, values = self.out.shape[2:]
        tokens = before[out][..., 3 : 3 + heads * values].unflatten(2, (heads, values))
        for row, block in enumerate(self.blocks):
            mine = slice(*self.window.start_loc[row : row + 2].tolist())
            if block <= 0:
                tokens[0, mine] = 0
                continue
            tokens[0, mine] = self.out[0, mine]
            if self.due[row]:
                before[state][block] = self.state[block]
            for part in (corrections, keys, gates):
                written = self.write[row], slice(None), slice(self.lengths[row])
                before[part][written] = self.buffers[part][written]
        for was, now in zip(before, changed, strict=True):
            torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)


@dataclass
class Errors:
    """The greatest error of each kind of result, as a part of the vector's norm."""

    worst: dict[str, float] = field(default_factory=dict)

    def note(
        self,
        what: str,
        got: torch.Tensor,
        want: torch.Tensor,
        rounded: torch.dtype = torch.float32,
        size: torch.Tensor | None = None,
    ) -> None:
        """Note how far ``got`` is from ``want``, beyond the rounding to a 16-bit type."""
        error = (got - want).norm(dim=-1) / (want.norm(dim=-1) if size is None else size)
        allowed = BF16 if rounded == torch.bfloat16 else 0.0
        found = max(float(error.max()) - allowed, 0.0)
        assert found == found, f"{what}: NaN"
        self.worst[what] = max(self.worst.get(what, 0.0), found)


def unit(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., size] at length 1, as KDA norms keys and queries."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
