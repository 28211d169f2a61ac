"""The Triton forms of the fused KDA step at a small size, in the interpreter.

``python -m tests.support.kda_step_checks`` prints a JSON line a check: its name, what went wrong.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

# isort: off
from tests.support import interpreter  # before vLLM
import torch
from tests.support import kda_untouched
from tests.support.kda_float64 import CASES, Course, Outcome, errors, float64
from tests.support.kda_forms import Verify, folding, stock
from vllm_overlay.kda.chunk import verify_chunk
from vllm_overlay.kda.sequential import verify_sequential
# isort: on

interpreter.rebind()
CASE = replace(CASES["uneven_decay"], heads=1, rows=2, steps=2)
FORMS: dict[str, Verify] = {"chunk": verify_chunk, "sequential": verify_sequential}


@cache
def known() -> tuple[Course, Outcome, dict[str, float]]:
    """Return the case's course, what float64 makes of it, and stock's errors."""
    course = Course(CASE, "cpu")
    want = float64(course)
    return course, want, errors(stock(course), want)


def right(verify: Verify, *, unit: bool) -> None:
    """Steep and flat decays side by side: errors within the bars that a GPU's tests have."""
    course, want, of_stock = known()
    got = errors(folding(verify, unit=unit)(course), want)
    for part in ("outputs", "state"):
        assert got[part] <= max(1e-6, 8 * of_stock[part]), (part, got, of_stock)
    assert got["rounded"] <= 1.2 * of_stock["rounded"], (got, of_stock)


def checks() -> dict[str, Callable[[], None]]:
    """Return the checks by name: each form with one of the two kinds of records."""
    found: dict[str, Callable[[], None]] = {}
    for form, verify in FORMS.items():
        unit = form == "chunk"
        layout = {"unit": not unit, "state": torch.bfloat16, "device": "cpu", "heads": 1}
        found[f"right-{form}"] = partial(right, verify, unit=unit)
        found[f"apart-{form}"] = partial(kda_untouched.rows_are_apart, verify, **layout)
    return found


if __name__ == "__main__":
    for name, check in checks().items():
        try:
            check()
            wrong = ""
        except Exception:
            wrong = traceback.format_exc()
        print(json.dumps([name, wrong]), flush=True)
