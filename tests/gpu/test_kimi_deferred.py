"""The deferred RecoverSSM on a GPU at real head sizes, beside vLLM's own kernels.

Wants the vLLM of the fix's release importable: ``python3 -m pytest tests/gpu -n 6``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

vllm = pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def fix() -> Any:
    from tests.support.kimi_fix import load_fix

    return load_fix()


def sizes(**changes: Any) -> Any:
    from tests.support.kimi_world import Sizes

    real = {
        "heads": 6,
        "head_dim": 128,
        "num_spec": 4,
        "layers": 2,
        "slots": 8,
        "block": 48,
        "blocks": 120,
        "activation": torch.bfloat16,
        "device": "cuda",
    }
    return Sizes(**{**real, **changes})


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fused", [False, True], ids=["flush", "fused"])
def test_long_schedules(fix: Any, mode: str, dtype: torch.dtype, fused: bool) -> None:
    from tests.support.kimi_schedule import drive

    done = drive(sizes(mode=mode, dtype=dtype), fix, fused=fused, steps=80, seed=1)
    worst = done.comparison.worst
    print(f"{mode} {dtype} fused={fused}: {dict(done.seen)}, worst {worst:.2e} of the bound")


@pytest.mark.parametrize("fused", [False, True], ids=["flush", "fused"])
def test_a_window_of_eight(fix: Any, fused: bool) -> None:
    from tests.support.kimi_schedule import drive

    wide = sizes(num_spec=7, heads=12, slots=16, blocks=240, lower_bound=None)
    done = drive(wide, fix, fused=fused, steps=40, seed=2)
    print(f"window 8, fused={fused}: worst {done.comparison.worst:.2e} of the bound")


@pytest.mark.parametrize("window", [5, 8])
def test_errors_against_float64(fix: Any, window: int) -> None:
    """A fold and a verify from one state: the fused kernel errs no more than the stock ones."""
    from tests.support.kimi_reference import errors

    found = errors(fix, heads=6, requests=16, window=window, seed=window, device="cuda")
    print(f"window {window}: {found}")
    for what in ("state", "corrections", "outputs"):
        assert found["fused"][what] <= 2 * found["stock"][what], found
