"""What the shared KDA verify refuses, and what importing its package costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_overlay.kda.operands import Folds, Records, Window, check  # noqa: E402

ROWS, SIZE, HEADS, K, V = 3, 2, 2, 8, 16
TOKENS = ROWS * SIZE


def ints(count: int) -> Any:
    return torch.zeros(count, dtype=torch.int32)


def operands() -> dict[str, Any]:
    """Operands that fit, by the names of ``check``."""
    window = Window(
        q=torch.zeros(1, TOKENS, HEADS, K),
        k=torch.zeros(1, TOKENS, HEADS, K),
        v=torch.zeros(1, TOKENS, HEADS, V),
        gate=torch.zeros(1, TOKENS, HEADS, K),
        beta=torch.zeros(1, TOKENS, HEADS),
        a_log=torch.zeros(HEADS),
        gate_bias=torch.zeros(HEADS * K),
        lower_bound=None,
        start_loc=ints(ROWS + 1),
        blocks=ints(ROWS),
        size=SIZE,
    )
    keys, gates = torch.zeros(8, HEADS, SIZE, 2 * K).chunk(2, dim=-1)
    return {
        "window": window,
        "state": torch.zeros(4, HEADS, V, K),
        "records": Records(torch.zeros(8, HEADS, SIZE, V), keys, gates, unit=True),
        "write_rows": ints(ROWS),
        "folds": Folds(ints(ROWS), ints(ROWS + 1)),
        "out": torch.zeros(1, TOKENS, HEADS, V),
    }


def changed(part: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    """Replace a part's fields."""
    return lambda given: given.update({part: replace(given[part], **values)})


def other(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Replace an operand."""
    return lambda given: given.update({name: value})


def apart(*shape: int) -> Any:
    """A tensor whose last two axes are not in one piece."""
    return torch.zeros(*shape[:-1], shape[-1] + 1)[..., : shape[-1]]


BAD: dict[str, Callable[[dict[str, Any]], None]] = {
    "head sizes": changed("window", v=torch.zeros(1, TOKENS, HEADS, 8)),
    "k (1, 6, 2, 4)": changed("window", k=torch.zeros(1, TOKENS, HEADS, 4)),
    "heads of gate": changed("window", gate=apart(1, TOKENS, HEADS, K)),
    "heads of v": changed("window", v=apart(1, TOKENS, HEADS, V)),
    "beta": changed("window", beta=torch.zeros(1, TOKENS, HEADS + 1)),
    "[2] and [16]": changed("window", gate_bias=torch.zeros(HEADS, K)),
    "float32 in one piece": changed("window", a_log=torch.zeros(HEADS).bfloat16()),
    "start_loc": changed("window", start_loc=ints(ROWS)),
    "at most 3 windows of 1": changed("window", size=1),
    "the state": other("state", torch.zeros(4, HEADS, K, V)),
    "a block's state": other("state", apart(4, HEADS, V, K)),
    "the records' corrections": changed("records", corrections=torch.zeros(8, HEADS, 3, V)),
    "the records' keys": changed("records", keys=torch.zeros(8, HEADS, SIZE, K + 1)),
    "the keys' strides": changed("records", gates=torch.zeros(8, HEADS, SIZE, K)),
    "the records' types": changed("records", corrections=torch.zeros(8, HEADS, SIZE, V).double()),
    "the write_rows": other("write_rows", ints(ROWS - 1)),
    "the lens": changed("folds", lens=ints(2 * ROWS)[::2]),
    "the output": other("out", torch.zeros(1, TOKENS, HEADS, K)),
}


def test_what_fits_is_taken() -> None:
    given = operands()
    check(**given)
    raw = replace(given["records"], unit=False)  # the activations are float32 here
    check(**{**given, "records": raw})


@pytest.mark.parametrize("said", BAD)
def test_what_does_not_fit_is_refused(said: str) -> None:
    given = operands()
    BAD[said](given)
    with pytest.raises(ValueError, match=r"^KDA verify: .* do not fit: expected ") as error:
        check(**given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_raw_records_are_of_the_activations_type() -> None:
    given = operands()
    halves = {name: getattr(given["window"], name).bfloat16() for name in ("q", "k", "v", "gate")}
    given["window"] = replace(given["window"], **halves)
    check(**given)
    given["records"] = replace(given["records"], unit=False)
    with pytest.raises(ValueError, match=r"expected float32, torch.bfloat16 and torch.bfloat16"):
        check(**given)


def test_the_package_itself_imports_nothing_large() -> None:
    large = "{'torch', 'triton', 'vllm'}"
    code = f"import sys, vllm_overlay.kda; print(sorted({large} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
