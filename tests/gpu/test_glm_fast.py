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


def sizes(**changes: Any) -> Any:
    from tests.support.kda_world import Sizes

    real = {
        "heads": 6,
        "head_dim": 128,
        "num_spec": 4,
        "layers": 2,
        "slots": 4,
        "block": 48,
        "blocks": 64,
        "activation": torch.bfloat16,
        "device": "cuda",
    }
    return Sizes(**{**real, **changes})


def schedule(size: Any, wanted: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drive both forms through a schedule, its full graphs captured; ``form`` of the verify."""
    from tests.support import kda_schedule
    from tests.support.glm_world import GlmWorld
    from vllm_overlay.kda import native, verify

    if form == "triton":  # the chunk kernels from three rows on, the sequential one below
        monkeypatch.setattr(native, "library", lambda device: None)
        monkeypatch.setattr(verify, "CHUNK_FROM", 3 * size.heads)
    elif native.library(torch.device("cuda")) is None:
        pytest.skip(native.form(torch.device("cuda")))
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
    schedule(sizes(mode=mode, dtype=dtype), wanted, form, monkeypatch)


@FORMS
def test_a_window_of_eight(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = sizes(num_spec=7, heads=12, slots=6, blocks=80)
    schedule(wide, "ALIGNED", form, monkeypatch)
