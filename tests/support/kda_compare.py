"""What the schedules compare a deferred world by: graphs of it, and the bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.support.kda_world import Sizes, World

EPS = 2.0**-24  # half an ulp of float32, relative


class Graph:
    """A CUDA graph of a world's verify. Its warm-up and its capture share their metadata."""

    def __init__(self, world: World, metadata: Any, inputs: list[tuple[torch.Tensor, ...]]) -> None:
        self.inputs = inputs
        world.verify(metadata, inputs)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = world.verify(metadata, inputs)

    def __call__(self, inputs: list[tuple[torch.Tensor, ...]]) -> list[Any]:
        for staged, given in zip(self.inputs, inputs, strict=True):
            for target, (axis, source) in zip(
                staged, zip((0, 1, 1), given, strict=True), strict=True
            ):
                target.copy_(source.narrow(axis, 0, target.shape[axis]))
        self.graph.replay()
        return [out.clone() for out in self.outputs]


@dataclass
class Comparison:
    """``exact``: bit for bit, else within the derived bound. ``worst``: the greatest error seen, as
    a part of what is allowed; ``tokens``: how many a request has verified since all were equal."""

    sizes: Sizes
    exact: bool
    tokens: int = 0
    worst: float = 0.0

    def close(self, want: torch.Tensor, got: torch.Tensor, what: str) -> None:
        """Compare the last axis as vectors, bit for bit or within the derived bound.

        A token's linear map of a state row has norm at most 1 (decays and an unit key), so errors
        add up. One token's own error, in roundings of the row's size: token by token at most
        K + 48, a sum over K, a handful of products, and the gate's exponential of at most 5. In a
        chunk of W tokens it has up to W such sums, of the state and of corrections of at most
        twice the size, each with up to W decays multiplied, 8 roundings a decay:
        2 W (K + 48 + 8 W). A bfloat16 state adds a rounding of 2**-8, an output one of its type.
        States are made of normal values, so a row's size is about the root of K.
        """
        if self.exact:
            assert torch.equal(want, got), f"{what} differ by {(want - got).abs().max()}"
            return
        window, own = self.sizes.window, self.sizes.head_dim + 48
        size = max(want.norm(dim=-1).max().item(), 2 * self.sizes.head_dim**0.5)
        tokens = self.tokens + 2 * window
        part = (own + 2 * window * (own + 8 * window)) * EPS * tokens
        if self.sizes.dtype == torch.bfloat16:
            part += 2.0**-8 * tokens
        if self.sizes.activation == torch.bfloat16:
            part += 2.0**-8
        error = (want - got).norm(dim=-1).max().item() / (part * size)
        assert error <= 1, f"{what} differ by {error:.2f} of the bound"
        self.worst = max(self.worst, error)
