"""A speculative step of GLM-5.3-Flash's KDA layers: stock, the plain port, and the fix.

On a GPU, with the fix applied:
``python -m tests.support.with_fixes glm5next-recoverssm python -m bench.glm5next_recoverssm``

The forward part (one launch a layer) is timed as a replayed CUDA graph, as the engine runs it; the
commit both as launched from Python, as the engine runs it, and as a graph.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.models.glm5next.common import recoverssm_commit
from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent_kda

from bench import recoverssm_port
from bench.gpu import copy_ceiling, graph, launches, machine, median_ms
from vllm_overlay.bench.record import RESULTS, save

WINDOW, DIM, LAYERS, GROUPS = 8, 128, 34, 4  # vLLM makes four KV-cache groups of 34 KDA layers
STOCK_BYTES = 30 << 30  # stock's states of as many layers as fit; the others share theirs
FORWARD = ("stock", "port", "fix")


class Setup:
    """Layers with pages of their own, all rows of a full window; states of type ``state``.

    ``port``: with what the plain port needs.
    """

    def __init__(
        self,
        heads: int,
        rows: int,
        *,
        state: torch.dtype = torch.float32,
        port: bool = False,
        layers: int = LAYERS,
        device: str = "cuda",
    ) -> None:
        torch.manual_seed(0)
        self.heads, self.rows, self.state, self.port = heads, rows, state, port
        self.device = device
        size = (heads, DIM, DIM)
        self.slots = (
            (1 + torch.randperm(rows * WINDOW, device=self.device)).view(rows, WINDOW).int()
        )
        self.blocks = (1 + torch.randperm(rows, device=self.device)).int()
        self.start = torch.arange(
            0, rows * WINDOW + 1, WINDOW, dtype=torch.int32, device=self.device
        )
        self.ones = torch.ones(rows, dtype=torch.int32, device=self.device)
        per_layer = (1 + rows * WINDOW) * heads * DIM * DIM * state.itemsize
        kept = max(1, min(layers, STOCK_BYTES // per_layer))
        stock = [
            torch.randn(1 + rows * WINDOW, *size, device=self.device, dtype=state)
            for _ in range(kept)
        ]
        self.layers = [self._layer(stock[number % kept]) for number in range(layers)]
        groups = [self.layers[group::GROUPS] for group in range(GROUPS)]
        self.groups = groups
        self.contexts = [self._context(layers) for layers in groups]
        self.table = recoverssm_commit.CommitTable.create(self.contexts)
        self.replay_table = torch.zeros((rows, WINDOW + 1), dtype=torch.int32, device=self.device)
        self.from_column = torch.full_like(self.ones, WINDOW + 1)

    def _layer(self, stock: torch.Tensor) -> dict[str, Any]:
        heads, rows, tokens = self.heads, self.rows, self.rows * WINDOW
        mixed = torch.randn(tokens, 3 * heads * DIM, device=self.device).bfloat16()
        new = {"device": self.device, "dtype": torch.bfloat16}
        channels = 3 * heads * DIM
        conv = torch.randn(1 + rows, 3 + WINDOW - 1, channels, device=self.device).bfloat16()
        layer: dict[str, Any] = {
            "stock": stock,
            "state": torch.randn(1 + rows, heads, DIM, DIM, device=self.device, dtype=self.state),
            "conv": conv,
            "qkv": tuple(part.view(1, tokens, heads, DIM) for part in mixed.split(heads * DIM, -1)),
            "gate": torch.randn(1, tokens, heads, DIM, **new),
            "beta": torch.randn(1, tokens, 3 * heads, **new)[..., heads : 2 * heads],
            "out": torch.empty(1, tokens, heads, DIM, **new),
            "a_log": torch.rand(heads, device=self.device),
            "bias": torch.rand(heads * DIM, device=self.device),
            "records": recoverssm_commit.allocate_records(
                rows, heads, DIM, WINDOW, torch.float32, torch.device(self.device)
            ),
        }
        if self.port:
            layer |= {
                "replayed": torch.empty(1, tokens, heads, DIM, **new),
                "raw_kv": torch.empty(rows, WINDOW, 2, heads, DIM, **new),
                "raw_gate": torch.empty(rows, WINDOW, heads, DIM, **new),
                "raw_beta": torch.empty(rows, WINDOW, heads, **new),
            }
        return layer

    def _context(
        self, layers: list[dict[str, Any]]
    ) -> recoverssm_commit.Glm5NextRecoverSSMCommitContext:
        return recoverssm_commit.Glm5NextRecoverSSMCommitContext.create(
            [
                SimpleNamespace(
                    kv_cache=(layer["conv"], layer["state"]), recoverssm_records=layer["records"]
                )
                for layer in layers
            ],
            spec_query_len=WINDOW,
            max_num_reqs=self.rows,
        )

    def forward(self, form: str) -> None:
        for layer in self.layers:
            if form == "port":
                recoverssm_port.verify(layer["qkv"], layer, self.blocks)
                continue
            q, k, v = layer["qkv"]
            common = {
                "q": q,
                "k": k,
                "v": v,
                "g": layer["gate"],
                "beta": layer["beta"],
                "out": layer["out"],
            }
            common |= {"a_log": layer["a_log"], "g_bias": layer["bias"], "lower_bound": -5.0}
            if form == "stock":
                fused_recurrent_kda(
                    initial_state=layer["stock"],
                    use_qk_l2norm_in_kernel=True,
                    cu_seqlens=self.start,
                    ssm_state_indices=self.slots,
                    num_accepted_tokens=self.ones,
                    sigmoid_beta=True,
                    compute_gate=True,
                    **common,
                )
            else:
                recoverssm_commit.kda_recoverssm_verify(
                    checkpoint_state=layer["state"],
                    records=layer["records"],
                    query_start_loc=self.start,
                    state_indices=self.blocks,
                    **common,
                )

    def commit(self, form: str, accepted: torch.Tensor) -> None:
        if form == "fix":
            self.plan(accepted)
            self.table.apply(self.rows)
            return
        for context, layers in zip(self.contexts, self.groups, strict=True):
            context.prepare(accepted, recoverssm_commit.CommitRows(self.blocks, self.start))
            context.table.compact(self.rows)
            recoverssm_port.replay(
                layers, context.plan, self.replay_table, self.start, self.from_column
            )

    def plan(self, accepted: torch.Tensor) -> None:
        """Plan the fix's commit of all groups."""
        rows = recoverssm_commit.CommitRows(self.blocks, self.start)
        recoverssm_commit.plan_commits(self.contexts, accepted, [rows] * len(self.contexts))

    def bytes(self, form: str, accepted: int) -> float:
        """What a whole step must move at least: states, inputs, outputs, records, windows."""
        token = self.rows * self.heads * DIM
        state = token * DIM * 4
        inputs = WINDOW * token * 2 * 5
        if form == "stock":
            return LAYERS * (state * (1 + WINDOW) + inputs)
        written, read = (6, 6) if form == "port" else (12, 12)
        replayed = WINDOW if form == "port" else accepted
        records = token * (WINDOW * written + replayed * read)
        window = self.rows * 3 * self.heads * DIM * 3 * 2 * (2 if accepted > 1 else 0)
        return LAYERS * (3 * state + inputs + records + window)


def measure(heads: int, rows: int, accepted: Sequence[int], ceiling: float) -> list[dict[str, Any]]:
    setup = Setup(heads, rows, port=True)
    found = []
    forward = {form: median_ms(graph(partial(setup.forward, form))) for form in FORWARD}
    counts = {form: launches(partial(setup.commit, form, setup.ones)) for form in ("port", "fix")}
    for number, form in itertools.product(accepted, FORWARD):
        taken = setup.ones * number
        commit = commit_graph = 0.0
        if form != "stock":
            setup.forward(form)  # so that the records are finite
            commit = median_ms(partial(setup.commit, form, taken))
            commit_graph = median_ms(graph(partial(setup.commit, form, taken)))
        step = forward[form] + commit
        moved = setup.bytes(form, number)
        found.append(
            {
                "heads": heads,
                "requests": rows,
                "accepted": number,
                "form": form,
                "forward_ms": round(forward[form], 4),
                "commit_ms": round(commit, 4),
                "commit_graph_ms": round(commit_graph, 4),
                "step_ms": round(step, 4),
                "x_stock": round(step / forward["stock"], 3),
                "launches": LAYERS + counts.get(form, 0),
                "commit_launches": counts.get(form, 0),
                "bytes": round(moved),
                "share_of_copy": round(moved / (step * 1e-3) / ceiling, 3),
            }
        )
    return found


def sweep(heads: int, rows: int) -> None:
    """Tiles of the fix's two large kernels; the sums keep their order with one warp only."""
    setup = Setup(heads, rows)
    for tile in (8, 16, 32):
        recoverssm_commit._VERIFY_ROWS = tile
        ms = median_ms(graph(partial(setup.forward, "fix")))
        print(
            f"verify {heads:>3} heads {rows:>4} requests: {tile:>3} rows {ms:8.4f} ms", flush=True
        )
    for tile, warps in ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 4), (128, 8)):
        recoverssm_commit._FOLD_ROWS, recoverssm_commit._FOLD_WARPS = tile, warps
        both = [
            median_ms(graph(partial(setup.commit, "fix", setup.ones * number))) for number in (1, 8)
        ]
        line = f"commit {heads:>3} heads {rows:>4} requests: {tile:>3} rows {warps} warps"
        print(line, *(f"{ms:8.4f}" for ms in both), "ms at 1 and 8 accepted", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", default="16,64")
    parser.add_argument("--requests", default="8,16,64,128,256")
    parser.add_argument("--accepted", default="1,3,8")
    parser.add_argument("--sweep", action="store_true", help="try tiles; measure nothing else")
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS, help="keep the rows there")
    options = parser.parse_args(arguments)
    heads, requests, accepted = (
        [int(part) for part in text.split(",")]
        for text in (options.heads, options.requests, options.accepted)
    )
    if options.sweep:
        for size in itertools.product(heads, requests):
            sweep(*size)
            torch.cuda.empty_cache()
        return 0
    ceiling = copy_ceiling()
    print(f"copy: {ceiling / 1e12:.2f} TB/s", flush=True)
    command = "python -m bench.glm5next_recoverssm " + " ".join(arguments or sys.argv[1:])
    rows: list[dict[str, Any]] = []
    try:
        for size in itertools.product(heads, requests):
            found = measure(*size, accepted, ceiling)
            rows += found
            for row in found:
                print(*row.values(), flush=True)
            torch.cuda.empty_cache()
    finally:  # what was measured is kept, whatever ends it
        if options.save and rows:
            print(
                save("glm5next-recoverssm-kernels", command, rows, machine(ceiling), options.save)
            )
    print(*rows[0])
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    sys.exit(main())
