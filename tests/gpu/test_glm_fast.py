"""The flag ``fast`` of glm5next-recoverssm on a GPU at real head sizes, beside the exact form.

Needs a GPU, and vLLM with the fix applied: ``python -m tests.support.with_fixes
glm5next-recoverssm=fast python -m pytest tests/gpu/test_glm_fast.py``
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

if not Path("/dev/nvidiactl").exists():  # before anything large is imported
    pytest.skip("no GPU", allow_module_level=True)

import torch


def schedule(wanted: str, form: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Drive both forms through a schedule, its full graphs captured; ``form`` of the verify."""
    from tests.support import kda_schedule
    from tests.support.glm_world import GlmWorld
    from tests.support.kda_gpu import sizes, take_form

    size = sizes(**changes)
    take_form(form, monkeypatch, heads=size.heads)
    worlds = [GlmWorld(size, deferred=False), GlmWorld(size, deferred=True)]
    done = kda_schedule.drive([*worlds], [False], steps=60, seed=4)
    assert not [kind for kind in getattr(kda_schedule, wanted) if not done.seen[kind]], done.seen
    print(f"{size} {form}: worst {done.comparisons[0].worst:.2e} of the bound")


FORMS = pytest.mark.parametrize("form", ["library", "triton"])


@FORMS
@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_long_schedules(
    mode: str, dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = "ALIGNED" if mode == "align" else "ALWAYS"
    schedule(wanted, form, monkeypatch, mode=mode, dtype=dtype)


@FORMS
def test_a_window_of_eight(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule("ALIGNED", form, monkeypatch, num_spec=7, heads=12, slots=6, blocks=80)
