"""Kimi-K3's KDA verify and commit on a GPU: stock, deferred with a flush, deferred and fused.

One layer's step as the engine runs it: a verify of every request's window, then the commit of the
accepted tokens (random, half a window on average). The vLLM of the fix's release must be
importable. Prints tables; ``--out DIR`` also writes JSON there, ``--save`` into bench/results/.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton

from bench.record import save

HEAD_DIM = 128
LOWER_BOUND = -5.0
CONV = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
METHODS = ("stock", "flush", "fused")
# (kernel, values a program, key splits, warps) of the fused verify.
SWEEP = [
    ("seq", 8, 4, 1),
    ("seq", 16, 1, 1),
    ("seq", 16, 2, 1),
    ("seq", 16, 4, 1),
    ("seq", 16, 8, 1),
    ("seq", 32, 1, 4),
    ("seq", 32, 4, 1),
    ("seq", 32, 8, 1),
    ("seq", 32, 4, 2),
    ("seq", 64, 4, 4),
    ("chunk", 8, 4, 1),
    ("chunk", 16, 1, 1),
    ("chunk", 16, 4, 1),
    ("chunk", 16, 8, 1),
    ("chunk", 32, 4, 1),
    ("chunk", 32, 8, 1),
    ("chunk", 32, 4, 2),
    ("chunk", 64, 4, 2),
    ("chunk", 64, 4, 4),
    ("chunk", 128, 4, 4),
]

Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Sizes of one measurement: heads of a rank, requests, tokens of a window, the state's type."""

    heads: int
    requests: int
    window: int
    dtype: str

    @property
    def state_bytes(self) -> int:
        """Bytes of all requests' states."""
        size: int = DTYPES[self.dtype].itemsize
        return self.requests * self.heads * HEAD_DIM * HEAD_DIM * size

    def step_bytes(self, method: str) -> int:
        """Bytes that a step must move: states, verify's inputs and outputs, records both ways."""
        tokens = self.requests * self.window * self.heads
        activations = tokens * (5 * HEAD_DIM + 1) * 2  # q, k, v, gate, out, beta
        written = tokens * HEAD_DIM * (4 + 2 * 2)  # corrections in fp32, keys and gates
        read = written * (self.window + 1) // (2 * self.window)  # those of the accepted tokens
        passes = {"stock": 3, "flush": 3, "fused": 2}[method]
        return passes * self.state_bytes + activations + written + read


class Steps:
    """A layer with its caches, and a function for each part of a step."""

    def __init__(self, case: Case, fix: Any) -> None:
        from vllm.models.kimi_k3.nvidia.ops import recoverssm as stock

        self.case, self.fix, self.stock = case, fix, stock
        n, h, window = case.requests, case.heads, case.window
        torch.manual_seed(0)
        tokens = n * window

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self.state = torch.randn(n + 1, h, HEAD_DIM, HEAD_DIM, device="cuda").to(DTYPES[case.dtype])
        self.conv = random(n + 1, CONV - 1 + window - 1, 3 * h * HEAD_DIM)
        self.activations = [random(1, tokens, h, HEAD_DIM) for _ in range(4)]
        self.beta = random(1, tokens, h)
        self.out = random(1, tokens, h, HEAD_DIM)
        self.a_log = torch.rand(h, device="cuda") - 1
        self.dt_bias = torch.randn(h * HEAD_DIM, device="cuda")
        self.starts = torch.arange(0, tokens + 1, window, device="cuda", dtype=torch.int32)
        self.blocks = (torch.randperm(n, device="cuda") + 1).to(torch.int32)
        self.slots = torch.randperm(n, device="cuda").to(torch.int32)
        self.accepted = torch.randint(1, window + 1, (n,), device="cuda", dtype=torch.int32)
        self.pending = torch.zeros(n, dtype=torch.int32, device="cuda")

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

    def parts(self, method: str, launch: Any = None) -> dict[str, Callable[[], object]]:
        """Return the parts of a step by name; run in order, they are one step."""
        return self._stock() if method == "stock" else self._deferred(method, launch)

    def _stock(self) -> dict[str, Callable[[], object]]:
        case, stock = self.case, self.stock
        sizes = (case.requests, case.heads, case.window, HEAD_DIM, torch.bfloat16)
        records = stock.KDARecoverSSMRecords.allocate(*sizes, torch.device("cuda"))
        context = stock.KDARecoverSSMCommitContext.create(
            [self.layer(records)], spec_query_len=case.window, max_num_reqs=case.requests
        )
        gates = (self.beta, self.a_log, self.dt_bias, LOWER_BOUND, self.state, records)
        rows = (self.starts, self.blocks, case.window, self.out)
        return {
            "verify": lambda: stock.kda_recoverssm_verify(*self.activations, *gates, *rows),
            "commit": lambda: context.commit(self.accepted, self.blocks, self.starts),
        }

    def _deferred(self, method: str, launch: Any) -> dict[str, Callable[[], object]]:
        case, context_module, kernels = self.case, self.fix["context"], self.fix["kernels"]
        sizes = (case.requests, case.heads, case.window, HEAD_DIM, torch.bfloat16)
        halves = 2 if method == "fused" else 1
        records = context_module.allocate_records(*sizes, torch.device("cuda"), halves=halves)
        context = context_module.KDADeferredCommitContext.create(
            [self.layer(records)], spec_query_len=case.window, max_num_reqs=case.requests
        )
        step = context_module.KDARecoverSSMDeferred(
            self.slots, self.pending, None, context, self.blocks
        )
        gates = (self.beta, self.a_log, self.dt_bias, LOWER_BOUND, self.state, records)
        rows = (self.starts, self.blocks, case.window)
        written = context.write_rows if method == "fused" else self.slots
        folds = kernels.Folds(context.fold_lens, context.read_rows) if method == "fused" else None

        def plan() -> None:
            if method == "fused":
                step.plan(None)
            else:
                step.flush()

        def verify() -> None:
            kind, shape = launch or ("seq", None)
            function = kernels.verify_window if kind == "seq" else self.fix["chunk"].verify_chunk
            function(
                *self.activations,
                *gates,
                *rows,
                written,
                case.requests,
                out=self.out,
                folds=folds,
                launch=shape,
            )

        def commit() -> None:
            context.commit(
                self.accepted,
                self.blocks,
                self.starts,
                record_rows=self.slots,
                pending=self.pending,
            )

        return {"plan" if method == "fused" else "flush": plan, "verify": verify, "commit": commit}


def median(function: Callable[[], object]) -> float:
    """Return the median of a call in ms, caches cold."""
    ms: float = triton.testing.do_bench(function, warmup=5, rep=25, return_mode="median")
    return ms


def launches(function: Callable[[], object]) -> int:
    """Count what one call launches on the GPU."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(1 for event in profile.events() if "Synchronize" not in event.name)


def step(parts: dict[str, Callable[[], object]]) -> Callable[[], None]:
    def run() -> None:
        for part in parts.values():
            part()

    return run


def measure(case: Case, fix: Any, ceiling: float) -> list[Json]:
    """Measure the three methods; ``ceiling`` in bytes a ms."""
    rows: list[Json] = []
    steps = Steps(case, fix)
    for method in METHODS:
        parts = steps.parts(method)
        whole = step(parts)
        whole()
        ms = median(whole)
        row: Json = {**case.__dict__, "method": method, "ms": round(ms, 4)}
        row["parts_ms"] = part_times(parts)
        row["bytes"] = case.step_bytes(method)
        row["ceiling"] = round(row["bytes"] / ms / ceiling, 3)
        row["launches"] = launches(whole)
        rows.append(row)
    for row in rows:
        row["x_stock"] = round(row["ms"] / rows[0]["ms"], 3)
    return rows


def part_times(parts: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Time each part of a step, with the others run before it but outside the clock.

    A fold happens once a step: timing a fold alone would find nothing to do the second time.
    """
    names = list(parts)
    taken: dict[str, list[float]] = {name: [] for name in names}
    scratch = torch.empty(1 << 26, dtype=torch.int32, device="cuda")
    for _ in range(12):
        for name in names:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            scratch.zero_()
            begin.record()
            parts[name]()
            end.record()
            end.synchronize()
            taken[name].append(begin.elapsed_time(end))
    return {name: round(sorted(times)[len(times) // 2], 4) for name, times in taken.items()}


def sweep(case: Case, fix: Any) -> list[Json]:
    """Measure the fused verify in every shape of ``SWEEP``."""
    steps = Steps(case, fix)
    rows = []
    for shape in SWEEP:
        row: Json = {**case.__dict__, "shape": shape}
        try:
            parts = steps.parts("fused", (shape[0], fix["kernels"].Launch(*shape[1:])))
            step(parts)()
            row["ms"] = part_times(parts)["verify"]
        except Exception as error:  # a shape that does not compile is a result
            row["error"] = f"{type(error).__name__}: {error}"[:100]
        rows.append(row)
    return rows


def copy_ceiling() -> float:
    """Return bytes a ms, read and written, of a copy of 4 GiB."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms: float = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    moved: int = 2 * source.numel()
    return moved / ms


def precompile(jobs: Sequence[Callable[[], object]], workers: int) -> None:
    """Run each job in a forked child, so that all kernels are in Triton's cache afterwards.

    Nothing may have touched the GPU in this process before.
    """
    waiting = list(jobs)
    running: set[int] = set()
    failed = 0
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop()
            child = os.fork()
            if child == 0:
                try:
                    job()
                    os._exit(0)
                except BaseException as error:
                    print(f"precompile: {type(error).__name__}: {error}"[:300], flush=True)
                    os._exit(1)
            running.add(child)
        done, status = os.wait()
        running.discard(done)
        failed += status != 0
    if failed > len(jobs) // 2:
        raise SystemExit(f"{failed} of {len(jobs)} variants did not compile")


def compile_jobs(cases: Iterable[Case], sweeps: Iterable[Case], fix: Any) -> list[Any]:
    """Return a job for each method and kernel variant of the cases."""
    kinds = {(case.heads, case.window, case.dtype) for case in cases}

    def run(kind: tuple[int, int, str], method: str, shape: Any) -> None:
        launch = (shape[0], fix["kernels"].Launch(*shape[1:])) if shape else None
        parts = Steps(Case(kind[0], 2, kind[1], kind[2]), fix).parts(method, launch)
        step(parts)()
        torch.cuda.synchronize()

    jobs: list[Any] = []
    for kind, method in itertools.product(sorted(kinds), METHODS):
        jobs.append(functools.partial(run, kind, method, None))
    for case, shape in itertools.product(sweeps, SWEEP):
        kind = (case.heads, case.window, case.dtype)
        jobs.append(functools.partial(run, kind, "fused", shape))
    return jobs


def show(rows: Iterable[Json]) -> None:
    for row in rows:
        parts = " ".join(f"{name} {ms:.3f}" for name, ms in row["parts_ms"].items())
        print(
            f"H{row['heads']:<3} N{row['requests']:<4} W{row['window']} {row['dtype']} "
            f"{row['method']:<6} {row['ms']:.3f} ms  x {row['x_stock']:.2f}  "
            f"{row['ceiling']:.0%} of copy  {row['launches']} launches  ({parts})",
            flush=True,
        )


def show_sweep(rows: Sequence[Json]) -> None:
    shapes = [
        f"{'/'.join(map(str, row['shape']))}:{row.get('ms', row.get('error'))}" for row in rows
    ]
    first = rows[0]
    print(f"sweep H{first['heads']} N{first['requests']} W{first['window']} {first['dtype']}:")
    print("  kernel/BV/splits/warps:ms ", *shapes, flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=numbers, default=[6, 12, 64])
    parser.add_argument("--requests", type=numbers, default=[8, 16, 64, 128, 256])
    parser.add_argument("--windows", type=numbers, default=[5, 8])
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--sweep", action="store_true", help="the fused verify in several shapes")
    parser.add_argument("--only-sweep", action="store_true")
    parser.add_argument("--workers", type=int, default=16, help="children that compile at a time")
    parser.add_argument("--out", type=Path, help="a folder for JSON")
    parser.add_argument("--save", action="store_true", help="write into bench/results/")
    options = parser.parse_args(arguments)

    # Else Triton's look for a GPU starts CUDA, and no forked child could.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    from tests.support.kimi_fix import load_fix

    fix = load_fix()
    kinds = itertools.product(
        options.heads, options.windows, options.dtypes.split(","), options.requests
    )
    cases = [] if options.only_sweep else [Case(h, n, w, d) for h, w, d, n in kinds]
    swept = [Case(64, 128, 8, "fp32"), Case(12, 64, 5, "fp32")]
    swept = swept if options.sweep or options.only_sweep else []
    precompile(compile_jobs([*cases, *swept], swept, fix), options.workers)
    ceiling = copy_ceiling()
    print(f"copy {ceiling / 1e9:.2f} TB/s", flush=True)
    sweeps: list[Json] = []
    for case in swept:
        show(measure(case, fix, ceiling))
        found = sweep(case, fix)
        show_sweep(found)
        sweeps += found
    rows: list[Json] = []
    for case in cases:
        found = measure(case, fix, ceiling)
        show(found)
        rows += found
        torch.cuda.empty_cache()
    if options.out:
        body = {"gpu": torch.cuda.get_device_name(), "copy_bytes_per_ms": ceiling}
        text = json.dumps({**body, "rows": rows, "sweep": sweeps}, indent=1)
        (options.out / "kda_deferred.json").write_text(text + "\n")
    if options.save:
        print(save("kda_deferred", f"python -m bench.kda_deferred {' '.join(sys.argv[1:])}", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
