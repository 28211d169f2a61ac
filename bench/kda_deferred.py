"""Kimi-K3's KDA verify and commit on a GPU: stock, deferred with a flush, fused in two ways.

One layer's step as the engine runs it: a verify of every request's window, then the commit of the
accepted tokens (random, half a window on average); timed as replayed CUDA graphs, caches cold. On a
GPU, with the fix applied:
``python -m tests.support.with_fixes kimi-k3-deferred-recoverssm python -m bench.kda_deferred``
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.models.kimi_k3.nvidia.ops import recoverssm as stock
from vllm.models.kimi_k3.nvidia.specialized_decode.recoverssm import context

from bench.gpu import compile_all, copy_ceiling, graph, machine, seconds_used
from vllm_overlay.bench.record import RESULTS, save
from vllm_overlay.kda import native, operands
from vllm_overlay.kda.chunk import verify_chunk
from vllm_overlay.kda.sequential import verify_sequential
from vllm_overlay.kda.verify import Verify

HEAD_DIM = 128
LOWER_BOUND = -5.0
CONV = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Json = dict[str, Any]
Parts = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """Sizes of one measurement: heads of a rank, requests, tokens of a window, the state's type."""

    heads: int
    requests: int
    window: int
    dtype: str = "fp32"

    def __str__(self) -> str:
        return f"H{self.heads:<3} N{self.requests:<4} W{self.window} {self.dtype}"

    def step_bytes(self, method: str) -> int:
        """Bytes that a step must move: states, verify's inputs and outputs, records both ways."""
        tokens = self.requests * self.window * self.heads
        states: int = self.requests * self.heads * HEAD_DIM**2 * DTYPES[self.dtype].itemsize
        activations = tokens * (5 * HEAD_DIM + 1) * 2  # q, k, v, gate, out, beta
        written = tokens * HEAD_DIM * (4 + 2 * 2)  # corrections in fp32, keys and gates
        read = written * (self.window + 1) // (2 * self.window)  # those of the accepted tokens
        passes = 3 if method in ("stock", "flush") else 2
        return passes * states + activations + written + read


FUSED: dict[str, Verify] = {"sequential": verify_sequential, "chunk": verify_chunk}


def methods() -> list[str]:
    """Return what can be measured here: the CUDA library's form where there is one."""
    library = native.library(torch.device("cuda"))
    if library is not None:
        FUSED["cuda"] = library.fold_verify
    return ["stock", "flush", *FUSED]


class Steps:
    """A layer with its caches, and a function for each part of a step."""

    def __init__(self, case: Case, device: str = "cuda") -> None:
        self.case = case
        n, h, window = case.requests, case.heads, case.window
        torch.manual_seed(0)
        torch.set_default_device(device)
        tokens = n * window

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16)

        self.state = torch.randn(n + 1, h, HEAD_DIM, HEAD_DIM).to(DTYPES[case.dtype])
        self.conv = random(n + 1, CONV - 1 + window - 1, 3 * h * HEAD_DIM)
        mixed = random(1, tokens, 3 * h * HEAD_DIM).split(h * HEAD_DIM, -1)  # as after a layer's
        self.activations = [part.unflatten(-1, (h, HEAD_DIM)) for part in mixed]  # convolution
        self.activations.append(random(1, tokens, h, HEAD_DIM))
        self.beta = random(1, tokens, h)
        self.out = random(1, tokens, h, HEAD_DIM)
        self.a_log = torch.rand(h) - 1
        self.dt_bias = torch.randn(h * HEAD_DIM)
        self.starts = torch.arange(0, tokens + 1, window, dtype=torch.int32)
        self.blocks = (torch.randperm(n) + 1).to(torch.int32)
        self.slots = torch.randperm(n).to(torch.int32)
        self.accepted = torch.randint(1, window + 1, (n,), dtype=torch.int32)
        self.pending = torch.zeros(n, dtype=torch.int32)
        self.gates = (self.beta, self.a_log, self.dt_bias, LOWER_BOUND)
        self.rows = (self.starts, self.blocks, window)
        self.sizes = (n, h, window, HEAD_DIM, torch.bfloat16, torch.device(device))

    def layer(self, records: Any) -> Any:
        return SimpleNamespace(
            kv_cache=(self.conv, self.state),
            recoverssm_records=records,
            A_log=self.a_log,
            dt_bias=self.dt_bias,
            local_num_heads=self.case.heads,
            head_dim=HEAD_DIM,
            gate_lower_bound=LOWER_BOUND,
        )

    def parts(self, method: str) -> Parts:
        """Return the parts of a step by name; run in order, they are one step."""
        return self._stock() if method == "stock" else self._deferred(method)

    def _stock(self) -> Parts:
        records = stock.KDARecoverSSMRecords.allocate(*self.sizes)
        committed = stock.KDARecoverSSMCommitContext.create(
            [self.layer(records)], spec_query_len=self.case.window, max_num_reqs=self.case.requests
        )
        inputs = (*self.activations, *self.gates, self.state, records, *self.rows, self.out)
        return {
            "verify": lambda: stock.kda_recoverssm_verify(*inputs),
            "commit": lambda: committed.commit(self.accepted, self.blocks, self.starts),
        }

    def _deferred(self, method: str) -> Parts:
        requests = self.case.requests
        fused = method != "flush"
        records = context.allocate_records(*self.sizes, halves=2 if fused else 1)
        made = context.KDADeferredCommitContext.create(
            [self.layer(records)], spec_query_len=self.case.window, max_num_reqs=requests
        )
        self.pending.zero_()
        state = (self.slots, self.pending, None, made, self.blocks)
        step = context.KDARecoverSSMDeferred(*state)
        inputs = (*self.activations, *self.gates)
        ledger = made.ledger
        q, k, v, gate = self.activations
        window = operands.Window(q, k, v, gate, *self.gates, *self.rows)
        kept = (context.as_operands(records), ledger.write_rows, requests, ledger.folds, self.out)

        def verify_stock() -> None:
            own = (made.step_records, *self.rows, self.out)
            stock.kda_recoverssm_verify(*inputs, self.state, *own)
            made.keep(records, requests)

        def verify_fused() -> None:
            FUSED[method](window, self.state, *kept)

        def commit() -> None:
            step = {"record_rows": self.slots, "pending": self.pending}
            made.commit(self.accepted, self.blocks, self.starts, **step)

        if fused:
            return {"plan": lambda: step.plan(None), "verify": verify_fused, "commit": commit}
        return {"flush": step.flush, "verify": verify_stock, "commit": commit}

    def outcome(self, method: str, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states and outputs after a step from ``start`` and the next step's verify."""
        self.state.copy_(start)
        parts = self.parts(method)
        run(parts)
        run({name: part for name, part in parts.items() if name != "commit"})
        return self.state.clone(), self.out.float()


def run(parts: Parts) -> None:
    for part in parts.values():
        part()


def times(parts: Parts, rounds: int = 15) -> Json:
    """Return the medians in ms of a step and of its parts, each after the ones before it.

    A fold happens once a step: timing a fold alone would find nothing to do the second time.
    """
    calls = {name: graph(part) for name, part in parts.items()}
    calls["step"] = graph(lambda: run(parts))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    scratch = torch.empty(1 << 26, dtype=torch.int32, device="cuda")
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            scratch.zero_()
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken[name].append(begin.elapsed_time(end))
    return {name: round(sorted(ms)[len(ms) // 2], 4) for name, ms in taken.items()}


def measure(case: Case, ceiling: float, until: float) -> list[Json]:
    """Measure the methods: times, and how far states and outputs are from stock's by their norm.

    ``ceiling`` in bytes a second. Begins nothing after ``until`` seconds of the process.
    """
    if seconds_used() > until:
        print(f"{seconds_used():.0f} s: no time for {case}", flush=True)
        return []
    steps = Steps(case)
    start = steps.state.clone()
    want: Sequence[torch.Tensor] = ()
    rows: list[Json] = []
    for method in methods():
        if seconds_used() > until:
            print(f"{seconds_used():.0f} s: no time for {case} {method}", flush=True)
            break
        row: Json = {**case.__dict__, "method": method}
        rows.append(row)
        got = steps.outcome(method, start)
        want = want or got
        row["error"] = [
            float((a.float() - b.float()).norm() / b.float().norm())
            for a, b in zip(got, want, strict=True)
        ]
        row |= times(steps.parts(method))
        row["x_stock"] = round(row["step"] / rows[0]["step"], 3)
        row["of_copy"] = round(case.step_bytes(method) / (row["step"] * 1e-3) / ceiling, 3)
        print(case, shown(row), flush=True)
    return rows


def shown(row: Json) -> str:
    parts = [name for name in ("plan", "flush", "verify", "commit") if name in row]
    text = f"{row['method']:<13} {row['step']:.4f} ms  x {row['x_stock']:.2f}  "
    text += f"{row['of_copy']:.0%} of copy  ("
    text += " ".join(f"{name} {row[name]:.4f}" for name in parts) + ")"
    return text + "  states {:.1e} outputs {:.1e} from stock's".format(*row["error"])


def compile_for(cases: Iterable[Case], workers: int, device: str = "cuda") -> float:
    """Compile what the cases launch, in threads; return the seconds it took."""
    few = sorted({replace(case, requests=2) for case in cases}, key=str)

    def launch(case: Case, method: str) -> None:
        run(Steps(case, device).parts(method))

    kinds = itertools.product(few, methods())
    return compile_all((partial(launch, case, method) for case, method in kinds), workers)


def keep(rows: list[Json], ceiling: float, folder: Path | None) -> None:
    """Save the rows measured so far in ``folder``, if there is one."""
    if folder is None:
        return
    command = "python -m bench.kda_deferred " + " ".join(sys.argv[1:])
    print(save("kda-deferred", command, rows, machine(ceiling), folder), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=numbers, default=[64, 12])
    parser.add_argument("--requests", type=numbers, default=[8, 16, 64, 128, 256])
    parser.add_argument("--windows", type=numbers, default=[8, 5])
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="that compile")
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS, help="keep the rows there")
    options = parser.parse_args(arguments)
    kinds = itertools.product(
        options.windows, options.heads, options.requests, options.dtypes.split(",")
    )
    cases = [Case(h, n, w, d) for w, h, n, d in kinds]
    ceiling = copy_ceiling()
    print(f"{seconds_used():.0f} s: copy {ceiling / 1e12:.2f} TB/s", flush=True)
    took = compile_for(cases, options.workers)
    print(f"{seconds_used():.0f} s: compiled in {took:.0f} s", flush=True)
    rows: list[Json] = []
    for case in cases:
        rows += measure(case, ceiling, options.seconds)
        torch.cuda.empty_cache()
    keep(rows, ceiling, options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
