"""The deferred RecoverSSM on a GPU at real head sizes, beside vLLM's own kernels.

Needs a GPU, and vLLM with the fix applied:
``python -m tests.support.with_fixes kimi-k3-deferred-recoverssm python -m pytest tests/gpu -n 14``
"""

from __future__ import annotations

from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():  # before anything large is imported
    pytest.skip("no GPU", allow_module_level=True)

import torch

FORMS = pytest.mark.parametrize("form", ["flush", "library", "triton"])


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@FORMS
def test_long_schedules(
    mode: str, dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.kda_gpu import sizes, take_form
    from tests.support.kda_schedule import ALIGNED, ALWAYS, drive
    from tests.support.kimi_world import KimiWorld

    take_form(form, monkeypatch, heads=6)
    fused, size = form != "flush", sizes(mode=mode, dtype=dtype)
    done = drive([KimiWorld(size), KimiWorld(size, fused)], [not fused], steps=50, seed=1)
    wanted = ALIGNED if mode == "align" else ALWAYS
    assert not [kind for kind in wanted if not done.seen[kind]], done.seen
    worst = done.comparisons[0].worst
    print(f"{mode} {dtype} {form}: {dict(done.seen)}, worst {worst:.2e} of the bound")


@FORMS
def test_a_window_of_eight(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.kda_gpu import sizes, take_form
    from tests.support.kda_schedule import ALIGNED, drive
    from tests.support.kimi_world import KimiWorld

    take_form(form, monkeypatch, heads=12)
    fused = form != "flush"
    wide = sizes(num_spec=7, heads=12, slots=6, blocks=80, lower_bound=None)
    done = drive([KimiWorld(wide), KimiWorld(wide, fused)], [not fused], steps=30, seed=2)
    assert not [kind for kind in ALIGNED if not done.seen[kind]], done.seen
    worst = done.comparisons[0].worst
    print(f"window 8, {form}: {dict(done.seen)}, worst {worst:.2e} of the bound")


@pytest.mark.parametrize("window", [5, 8])
def test_errors_against_float64(window: int) -> None:
    """A fold and a verify from one state: the fused kernels err at most twice as the stock ones."""
    from tests.support.kimi_reference import FUSED, errors

    found = errors(heads=6, requests=16, window=window, seed=window, device="cuda")
    print(f"window {window}: {found}")
    for kernel in FUSED:
        for what in ("state", "corrections", "outputs"):
            assert found[kernel][what] <= 2 * found["stock"][what], found
