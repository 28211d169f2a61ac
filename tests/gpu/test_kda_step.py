"""The fused KDA step on a GPU: every form's errors beside stock's, and what it leaves alone.

Needs a GPU and vLLM 0.33.0, no fix: ``python -m pytest tests/gpu/test_kda_step.py``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():  # before anything large is imported
    pytest.skip("no GPU", allow_module_level=True)

import torch

from bench.gpu import compile_all
from tests.support import kda_untouched
from tests.support.kda_float64 import CASES, Case, Course, Outcome, errors, float64
from tests.support.kda_forms import Verify, folding, stock
from vllm_overlay.kda import native
from vllm_overlay.kda.chunk import verify_chunk
from vllm_overlay.kda.sequential import verify_sequential

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNITS = {"unit": True, "raw": False}
CHAIN = {
    "random": Case(steps=4096, rows=2),
    "long_memory": Case(steps=4096, rows=2, decay="long"),
    "unbounded": Case(steps=4096, rows=2, decay="faint", lower_bound=None),
}
LIBRARY = native.library(torch.device("cuda"))
FORMS: dict[str, Verify] = {"chunk": verify_chunk, "sequential": verify_sequential}
if LIBRARY is not None:
    FORMS["cuda"] = LIBRARY.fold_verify
WITHOUT = pytest.mark.skipif(LIBRARY is None, reason=native.form(torch.device("cuda")))
ATOL = 1e-6  # of a window, in fp32

on_forms = pytest.mark.parametrize(
    "form", ["chunk", "sequential", pytest.param("cuda", marks=WITHOUT)]
)
on_states = pytest.mark.parametrize("state", DTYPES)
on_records = pytest.mark.parametrize("records", UNITS)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the Triton kernels together first: one after another they take minutes."""
    small = {replace(case, rows=2, steps=2) for case in [*CASES.values(), *CHAIN.values()]}
    courses = [
        Course(replace(case, state=dtype), "cuda") for case in small for dtype in DTYPES.values()
    ]
    calls = [partial(stock, course) for course in courses]
    kinds = itertools.product((verify_chunk, verify_sequential), UNITS.values())
    for verify, unit in kinds:
        calls += [partial(folding(verify, unit=unit), course) for course in courses]
        for dtype in DTYPES.values():
            ragged = Course(replace(CASES["ragged"], state=dtype), "cuda")
            calls.append(partial(folding(verify, unit=unit, out=torch.bfloat16), ragged))
            launch = kda_untouched.Launch(unit=unit, state=dtype, device="cuda")
            calls.append(partial(launch.verify, verify))
    compile_all(calls, os.cpu_count() or 1)


@contextmanager
def shown(what: str) -> Iterator[dict[str, dict[str, float]]]:
    """Print the errors that the block puts there, also if it fails."""
    found: dict[str, dict[str, float]] = {}
    try:
        yield found
    finally:
        for name, values in found.items():
            print(what, name, *(f"{part} {value:.2e}" for part, value in values.items()))


@cache
def known(case: Case) -> tuple[Course, Outcome, dict[str, float]]:
    """Return a case's course, what float64 makes of it, and stock's errors."""
    course = Course(case, "cuda")
    want = float64(course)
    return course, want, errors(stock(course), want)


def hold(case: Case, form: str, records: str) -> None:
    """Assert that a form's errors are within the bars of the state's type."""
    course, want, of_stock = known(case)
    with shown(f"{form} {records} {case}:") as found:
        found["stock"] = of_stock
        run = folding(FORMS[form], unit=UNITS[records])
        got = found["form"] = errors(run(course), want)
        if case.state == torch.float32:
            for part in ("outputs", "state"):
                assert got[part] <= max(ATOL, 8 * of_stock[part]), part
        else:
            assert got["outputs"] <= 1.2 * of_stock["outputs"]
            assert got["state"] <= 1.2 * of_stock["state"]
        assert got["rounded"] <= 1.2 * of_stock["rounded"]


@on_records
@on_states
@on_forms
@pytest.mark.parametrize("name", CASES)
def test_errors_against_float64(name: str, form: str, state: str, records: str) -> None:
    hold(replace(CASES[name], state=DTYPES[state]), form, records)


@on_states
@on_forms
@pytest.mark.parametrize(
    ("name", "records"), [("random", "raw"), ("long_memory", "unit"), ("unbounded", "raw")]
)
def test_drift_over_4096_steps(name: str, form: str, state: str, records: str) -> None:
    hold(replace(CHAIN[name], state=DTYPES[state]), form, records)


@on_records
@on_states
@on_forms
def test_outputs_in_the_activations_type(form: str, state: str, records: str) -> None:
    """Written as bfloat16 they are as right as stock's."""
    course, want, of_stock = known(replace(CASES["ragged"], state=DTYPES[state]))
    run = folding(FORMS[form], unit=UNITS[records], out=torch.bfloat16)
    got = errors(run(course), want)
    assert got["outputs"] <= 1.2 * of_stock["rounded"], (got, of_stock)


@on_records
@on_states
@on_forms
@pytest.mark.parametrize("name", kda_untouched.CHECKS)
def test_what_is_left_alone(name: str, form: str, state: str, records: str) -> None:
    check = kda_untouched.CHECKS[name]
    check(FORMS[form], unit=UNITS[records], state=DTYPES[state], device="cuda")
