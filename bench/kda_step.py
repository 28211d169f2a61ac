"""A whole speculative step of KDA layers, side by side: stock, exact, fast, and Kimi-K3's own.

The step is everything between two forwards for all of GLM-5.3-Flash's 34 KDA layers in four groups:
verify, and commit where there is one. ``stock`` keeps a state for each token; ``exact`` is the
fix glm5next-recoverssm, ``fast`` its verify that folds (``fast-raw``: with records as they came),
``k3`` the RecoverSSM that vLLM has for Kimi-K3. Times are medians of replayed CUDA graphs, caches
cold; errors are against float64, outputs before rounding. On a GPU, with the fix applied:
``python -m tests.support.with_fixes glm5next-recoverssm python -m bench.kda_step --save``
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from bench.glm5next_recoverssm import DIM, LAYERS, WINDOW, Setup
from bench.gpu import compile_all, copy_ceiling, graph, launches, machine, median_ms, seconds_used
from bench.kda_forms import FORMS
from tests.support import kda_forms
from tests.support.kda_float64 import Case, Course, Outcome, errors, float64
from vllm_overlay.bench.record import RESULTS, save
from vllm_overlay.kda import native
from vllm_overlay.kda.chunk import verify_chunk
from vllm_overlay.kda.sequential import verify_sequential
from vllm_overlay.kda.verify import Verify, triton_form

LIBRARY = native.library(torch.device("cuda"))
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = 9  # of a measurement, at least
ERROR_ROWS = 32  # of a measurement of errors, at most

Json = dict[str, Any]


def floor_bytes(heads: int, requests: int, state: torch.dtype, accepted: int) -> int:
    """Return what a step of all layers must move: each state read and written once, the inputs
    and outputs, the records as raw keys and gates, and the windows of the convolution."""
    token = requests * heads * DIM
    states: int = 2 * token * DIM * state.itemsize
    activations = WINDOW * (token * 5 + requests * heads) * 2
    records = (WINDOW + accepted) * token * (4 + 2 * 2)
    windows = 2 * requests * 3 * heads * DIM * 3 * 2 if accepted > 1 else 0
    return LAYERS * (states + activations + records + windows)


def replayed_ms(call: Callable[[], object]) -> float:
    """Return the median time of a graph of ``call``, in ms."""
    replay = graph(call)
    torch.cuda.synchronize()
    began = time.perf_counter()
    replay()
    torch.cuda.synchronize()
    rough = 1e3 * (time.perf_counter() - began)
    return median_ms(replay, rep=max(20.0, ROUNDS * rough))


def times(setup: Setup, form: str, accepted: Sequence[int], verify: Verify) -> Iterator[Json]:
    """Yield a form's times for each count of accepted tokens; stock's is one for all."""
    step = FORMS[form](setup, verify)

    def whole(taken: torch.Tensor) -> None:
        step.forward()
        step.commit(taken)

    counted = launches(partial(whole, setup.ones))
    step_ms = commit_ms = 0.0
    for number in accepted:
        taken = setup.ones * number
        if form != "stock":
            commit_ms = median_ms(partial(step.commit, taken), rep=10)
        if form != "stock" or not step_ms:
            step_ms = replayed_ms(partial(whole, taken))
        yield {
            "form": form,
            "accepted": number,
            "step_ms": round(step_ms, 4),
            "commit_from_python_ms": round(commit_ms, 4),
            "launches": counted,
        }


@lru_cache(maxsize=1)
def course_of(case: Case) -> tuple[Course, Outcome]:
    course = Course(case, "cuda")
    return course, float64(course)


@cache
def errors_of(form: str, case: Case, verify: Verify) -> dict[str, float]:
    """Return a form's errors over the steps of a case."""
    course, want = course_of(case)
    return errors(runs(verify)[form](course), want)


def runs(verify: Verify) -> dict[str, kda_forms.Run]:
    """Return how each form runs a course."""
    return {
        "stock": kda_forms.stock_glm,
        "exact": kda_forms.exact,
        "fast": kda_forms.folding(verify, unit=True),
        "fast-raw": kda_forms.folding(verify, unit=False),
        "k3": kda_forms.stock_k3,
    }


class Table:
    """The rows so far. ``until``: seconds of the process after which nothing begins."""

    def __init__(self, forms: Sequence[str], accepted: Sequence[int], until: float) -> None:
        self.forms, self.accepted, self.until = forms, accepted, until
        self.ceiling = copy_ceiling()  # bytes a second
        self.rows: list[Json] = []
        self.always = {
            "window": WINDOW,
            "layers": LAYERS,
            "gpu": torch.cuda.get_device_name(),
            "kernel": str(native.form(torch.device("cuda"))),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def measure(self, heads: int, requests: int, state: str) -> None:
        """Measure the forms at one size: all times, then all errors."""
        setup = Setup(heads, requests, state=STATES[state])
        verify = LIBRARY.fold_verify if LIBRARY else triton_form(requests, heads)
        found: list[Json] = []
        for form in ("stock", *(form for form in self.forms if form != "stock")):
            if seconds_used() > self.until:
                print(f"{seconds_used():.0f} s: no time for {form}", flush=True)
                break
            found += times(setup, form, self.accepted, verify)
            torch.cuda.empty_cache()
        del setup
        torch.cuda.empty_cache()
        rows = [row for row in found if row["form"] in self.forms]
        for row in sorted(rows, key=lambda row: int(row["accepted"])):
            row |= {"heads": heads, "requests": requests, "state": state}
            row["stock_ms"] = found[0]["step_ms"]
            row["x_stock"] = round(row["step_ms"] / row["stock_ms"], 3)
            floor = floor_bytes(heads, requests, STATES[state], row["accepted"])
            row["floor_bytes"] = floor
            row["floor_ms"] = round(floor / self.ceiling * 1e3, 4)
            row["share_of_copy"] = round(row["floor_ms"] / row["step_ms"], 3)
            row |= {**self._errors(row, verify), **self.always}
            self.rows.append(row)
            print(shown(row), flush=True)
        course_of.cache_clear()
        torch.cuda.empty_cache()

    def _errors(self, row: Json, verify: Verify) -> Json:
        case = Case(
            heads=row["heads"],
            rows=min(row["requests"], ERROR_ROWS),
            accepted=row["accepted"],
            state=STATES[row["state"]],
        )
        got, stock = (errors_of(form, case, verify) for form in (row["form"], "stock"))
        return {
            "out_err": got["outputs"],
            "state_err": got["state"],
            "stock_out_err": stock["outputs"],
            "stock_state_err": stock["state"],
        }


def shown(row: Json) -> str:
    return (
        f"{seconds_used():4.0f} s  H{row['heads']:<3} N{row['requests']:<4} {row['state']} "
        f"{row['form']:<5} {row['accepted']} accepted  {row['step_ms']:9.4f} ms  "
        f"x {row['x_stock']:.3f}  {row['launches']} launches  {row['share_of_copy']:.0%} of copy  "
        f"outputs {row['out_err']:.1e} ({row['stock_out_err']:.1e})  "
        f"states {row['state_err']:.1e} ({row['stock_state_err']:.1e})"
    )


def compile_for(heads: Sequence[int], states: Sequence[str], forms: Sequence[str]) -> float:
    """Compile what the forms launch, in threads; return the seconds it took."""
    verifies = [LIBRARY.fold_verify] if LIBRARY else [verify_sequential, verify_chunk]

    def launch(count: int, state: torch.dtype) -> None:
        setup = Setup(count, 2, state=state)
        course = Course(Case(heads=count, rows=2, steps=2, state=state), "cuda")
        for form, verify in itertools.product({"stock", *forms}, verifies):
            step = FORMS[form](setup, verify)
            step.forward()
            step.commit(setup.ones)
            runs(verify)[form](course)

    sizes = itertools.product(heads, states)
    calls = [partial(launch, count, STATES[state]) for count, state in sizes]
    return compile_all(calls, os.cpu_count() or 1)


def numbers(text: str) -> list[int]:
    """Read an option's numbers. Raises ValueError for anything else."""
    return [int(part) for part in text.split(",")]


def names(text: str, known: Iterable[str]) -> list[str]:
    """Read an option's names. Raises ArgumentTypeError for one that is not known."""
    found = text.split(",")
    if unknown := set(found) - set(known):
        wanted = f"expected of {', '.join(known)}"
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; {wanted}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=numbers, default=[64, 16, 12])
    parser.add_argument("--requests", type=numbers, default=[128, 8, 64, 256, 16, 32])
    parser.add_argument("--states", type=partial(names, known=STATES), default=list(STATES))
    parser.add_argument("--accepted", type=numbers, default=[3, 1, 8])
    parser.add_argument("--forms", type=partial(names, known=FORMS), default=list(FORMS)[:4])
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many")
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS, help="keep the rows there")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what there is gets saved
    table = Table(options.forms, options.accepted, options.seconds)
    print(f"{seconds_used():.0f} s: copy {table.ceiling / 1e12:.2f} TB/s", flush=True)
    took = compile_for(options.heads, options.states, options.forms)
    print(f"{seconds_used():.0f} s: compiled in {took:.0f} s", flush=True)
    command = "python -m bench.kda_step " + " ".join(arguments or sys.argv[1:])
    try:
        for size in itertools.product(options.states, options.heads, options.requests):
            state, heads, requests = size
            if seconds_used() > options.seconds:
                print(f"{seconds_used():.0f} s: no time for {heads} x {requests} {state}")
                break
            table.measure(heads, requests, state)
    finally:
        if options.save and table.rows:
            gpu = machine(table.ceiling)
            print(save("kda-step", command, table.rows, gpu, options.save), flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    sys.exit(main())
