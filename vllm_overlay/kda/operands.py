"""What a fused verify works on: a window of tokens, their records, the folds that come first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VALUES = 16  # a Triton program's values, whose multiple a head's value size must be


@dataclass(frozen=True)
class Window:
    """A layer's activations of one verify; the heads of a token lie in one piece.

    ``q``, ``k`` and ``gate`` [1, tokens, heads, K], ``v`` [1, tokens, heads, V] and ``beta``
    [1, tokens, heads] may have any stride from token to token. ``gate`` and ``beta`` are raw
    logits. ``a_log`` [heads] and ``gate_bias`` [heads * K] float32. A token's log decay is
    lower_bound * sigmoid(exp(a_log) * (gate + gate_bias)) or, with None for ``lower_bound``,
    -exp(a_log) * softplus(gate + gate_bias).

    ``start_loc`` int32 [rows + 1]: a row's tokens, at most ``size``. ``blocks`` int32 [rows], of
    any stride: its state's block; one of 0 or less is a padded row, whose outputs are zeroed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor
    a_log: Tensor
    gate_bias: Tensor
    lower_bound: float | None
    start_loc: Tensor
    blocks: Tensor
    size: int

    @property
    def rows(self) -> int:
        """The number of rows, padded ones included."""
        return int(self.blocks.shape[0])

    @property
    def tokens(self) -> int:
        """The number of tokens that the activations have room for."""
        return int(self.q.shape[1])

    @property
    def heads(self) -> int:
        """The number of heads of this rank."""
        return int(self.q.shape[2])

    @property
    def key_size(self) -> int:
        """K, the keys' head size."""
        return int(self.q.shape[3])

    @property
    def value_size(self) -> int:
        """V, the values' head size."""
        return int(self.v.shape[3])


@dataclass(frozen=True)
class Records:
    """What verified tokens leave for their fold, by record row.

    ``corrections`` float32 [record rows, heads, window, V]; ``keys`` and ``gates``
    [record rows, heads, window, K], of one layout. Views of any strides but a last one of 1.
    ``unit``: float32 unit keys and decays; else raw keys and gate logits, as the activations are.
    """

    corrections: Tensor
    keys: Tensor
    gates: Tensor
    unit: bool


@dataclass(frozen=True)
class Folds:
    """Per verify row, int32 [rows] or longer: pending tokens to fold first, their record row."""

    lens: Tensor
    rows: Tensor


def check(
    window: Window,
    state: Tensor,
    records: Records,
    write_rows: Tensor,
    folds: Folds,
    out: Tensor,
) -> None:
    """Raise ValueError for shapes, strides or types that a fused verify cannot take."""
    _check_window(window)
    heads, keys, values = window.heads, window.key_size, window.value_size
    if state.shape[1:] != (heads, values, keys):
        raise _unfit("the state", state.shape, f"[blocks, {heads}, {values}, {keys}]")
    if state.stride()[1:] != (values * keys, keys, 1):
        raise _unfit("a block's state", state.stride(), "one piece: its inner strides")
    _check_records(records, window)
    for name, part in (("write_rows", write_rows), ("lens", folds.lens), ("rows", folds.rows)):
        if part.shape[0] < window.rows or part.stride(0) != 1:
            raise _unfit(f"the {name} of the folds", part.shape, f"{window.rows} in a piece")
    indices = (window.start_loc, window.blocks, write_rows, folds.lens, folds.rows)
    if any(part.dtype != torch.int32 for part in indices):
        raise _unfit("the rows' types", [part.dtype for part in indices], "int32 each")
    if out.shape != window.v.shape or out.stride()[2:] != (values, 1):
        raise _unfit("the output", out.shape, f"{list(window.v.shape)}, its heads in one piece")


def _check_window(w: Window) -> None:
    tokens, heads, keys, values = w.tokens, w.heads, w.key_size, w.value_size
    if keys & (keys - 1) or values % VALUES:
        raise _unfit("the head sizes", (keys, values), f"a power of two, a multiple of {VALUES}")
    for name, part, size in (
        ("q", w.q, keys), ("k", w.k, keys), ("gate", w.gate, keys), ("v", w.v, values)
    ):  # fmt: skip
        if part.shape != (1, tokens, heads, size):
            raise _unfit(name, part.shape, f"[1, {tokens}, {heads}, {size}]")
        if part.stride()[2:] != (size, 1):
            raise _unfit(f"a token's heads of {name}", part.stride(), "one piece: strides")
    if w.beta.shape != (1, tokens, heads) or w.beta.stride(2) != 1:
        raise _unfit("beta", w.beta.shape, f"[1, {tokens}, {heads}], its heads in one piece")
    if w.a_log.shape != (heads,) or w.gate_bias.shape != (heads * keys,):
        shapes = (tuple(w.a_log.shape), tuple(w.gate_bias.shape))
        raise _unfit("a_log and gate_bias", shapes, f"[{heads}] and [{heads * keys}]")
    if any(part.dtype != torch.float32 or part.stride(0) != 1 for part in (w.a_log, w.gate_bias)):
        raise _unfit("a_log and gate_bias", w.a_log.dtype, "float32 in one piece")
    if w.start_loc.shape != (w.rows + 1,) or w.start_loc.stride(0) != 1:
        raise _unfit("start_loc", w.start_loc.shape, f"[{w.rows + 1}] in one piece")
    if tokens > w.rows * w.size:
        raise _unfit("the tokens", (tokens,), f"at most {w.rows} windows of {w.size}")


def _check_records(records: Records, w: Window) -> None:
    wide = {"corrections": w.value_size, "keys": w.key_size, "gates": w.key_size}
    for name, size in wide.items():
        part: Tensor = getattr(records, name)
        if part.shape[1:] != (w.heads, w.size, size) or part.stride(3) != 1:
            raise _unfit(f"the records' {name}", part.shape, f"[rows, {w.heads}, {w.size}, {size}]")
    if records.keys.stride() != records.gates.stride():
        raise _unfit("the records' gates", records.gates.stride(), "the keys' strides")
    kept = torch.float32 if records.unit else w.k.dtype
    types = (records.corrections.dtype, records.keys.dtype, records.gates.dtype)
    if types != (torch.float32, kept, kept):
        raise _unfit("the records' types", types, f"float32, {kept} and {kept}")


def _unfit(what: str, found: object, expected: str) -> ValueError:
    shown = found if isinstance(found, torch.dtype) else tuple(found)  # type: ignore[arg-type]
    return ValueError(f"KDA verify: {what} {shown} do not fit: expected {expected}")
