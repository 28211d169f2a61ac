"""What must hold of the shared KDA verify's Triton forms, in Triton's interpreter.

``python -m tests.support.kda_window_cases`` prints a JSON line for each case.
"""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tests.support.interpreter  # noqa: F401 (before vLLM)

# isort: split
import torch

from tests.support.kda_window import Shape, Trial
from vllm_overlay.kda import native, verify
from vllm_overlay.kda.chunk import verify_chunk
from vllm_overlay.kda.sequential import verify_sequential

FORMS = {"chunk": verify_chunk, "sequential": verify_sequential}
# float32, with sums of 16 and of a window: the greatest that these trials show is a quarter of it.
NEAR = 2e-6


def window(form: str, size: int) -> None:
    """Every kind of records, gate, state and activation, at one size of the window."""
    kinds = itertools.product((True, False), (-5.0, None))
    for number, (unit, bound) in enumerate(kinds):
        for dtype in (torch.float32, torch.bfloat16):
            other = torch.bfloat16 if (number + size) % 2 else torch.float32
            shape = Shape(size, unit, bound, state=dtype, activation=other)
            found = Trial(shape, seed=10 * size + number).run(FORMS[form]).worst
            assert len(found) == (5 if unit else 3)
            assert max(found.values()) < NEAR, (shape, found)


def steep_gates(form: str) -> None:
    """Logits at which an exponential of their own would overflow, or a decay be 0."""
    for bound in (-5.0, None):
        trial = Trial(Shape(3, True, bound, heads=1), seed=2)
        trial.window.gate[:, : sum(trial.lengths)] *= 100
        assert max(trial.run(FORMS[form]).worst.values()) < NEAR


def nothing_to_verify() -> None:
    """Without a token nothing is folded, and the output is returned as it is."""
    trial = Trial(Shape(2, False, None), seed=1)
    w = trial.window
    parts = {name: getattr(w, name)[:, :0] for name in ("q", "k", "v", "gate", "beta")}
    empty, out = replace(w, **parts), trial.out[:, :0]
    before = trial.state.clone()
    rest = (trial.records, trial.write_rows, trial.scratch, trial.folds, out)
    assert verify.fold_verify(empty, trial.state, *rest) is out
    assert torch.equal(trial.state, before)


def the_library_comes_first() -> None:
    """Where a CUDA library takes the window; else a Triton form, by rows x heads."""
    trial = Trial(Shape(2, False, None), seed=1)
    operands = (trial.window, trial.state, trial.records, trial.out)
    asked: list[Any] = []
    misfits = ["", "a reason"]

    def misfit(window: Any, *operands: Any) -> str:
        asked.append(window)
        return misfits[len(asked) - 1]

    library = SimpleNamespace(misfit=misfit, fold_verify=FORMS["chunk"], path=Path("kda_step.so"))
    known = native.library
    native.library = lambda device: library  # type: ignore[assignment]
    try:
        assert verify.form_for(*operands)[0] is FORMS["chunk"]
        form, key, why = verify.form_for(*operands)
        assert form is FORMS["sequential"] and key == "kernel where unfit"
        assert why == "triton: no kernel in kda_step.so for a reason"
    finally:
        native.library = known
    assert asked == [trial.window, trial.window]
    assert verify.form_for(*operands)[0] is FORMS["sequential"]
    assert verify.triton_form(verify.CHUNK_FROM, 1) is FORMS["chunk"]


def checked_and_run() -> None:
    """The public function checks its operands, and runs a form of them."""
    for unit in (True, False):
        trial = Trial(Shape(3, unit, -5.0), seed=4)
        assert max(trial.run(verify.fold_verify).worst.values()) < NEAR
    short = replace(trial.window, start_loc=trial.window.start_loc[:-1])
    rest = (trial.records, trial.write_rows, trial.scratch, trial.folds, trial.out)
    try:
        verify.fold_verify(short, trial.state, *rest)
    except ValueError as error:
        assert "start_loc" in str(error)
    else:
        raise AssertionError("no error")


CASES: dict[str, Callable[[], None]] = {
    "nothing_to_verify": nothing_to_verify,
    "the_library_comes_first": the_library_comes_first,
    "checked_and_run": checked_and_run,
}
for _form in FORMS:
    CASES[f"steep_gates_{_form}"] = lambda form=_form: steep_gates(form)  # type: ignore[misc]
    for _size in range(1, 9):
        CASES[f"{_form}_{_size}"] = lambda form=_form, size=_size: window(form, size)  # type: ignore[misc]


def main() -> None:
    """Print a line of JSON for each case: its name, and the traceback if it failed."""
    for name, case in CASES.items():
        error = ""
        try:
            case()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps([name, error]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
