"""Worlds of deferred commits on a GPU: real head sizes, and which verify folds. Needs a fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.kda_world import Sizes
from vllm_overlay.kda import native, verify


def sizes(**changes: Any) -> Sizes:
    """Return sizes with heads of 128, but for the changes."""
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


def take_form(form: str, monkeypatch: pytest.MonkeyPatch, *, heads: int) -> None:
    """Let the verify that folds be the CUDA ``library``'s, or skip; or ``triton``, both kernels."""
    if form == "triton":  # the chunk kernels from three rows on, the sequential one below
        monkeypatch.setattr(native, "library", lambda device: None)
        monkeypatch.setattr(verify, "CHUNK_FROM", 3 * heads)
    elif form == "library" and native.library(torch.device("cuda")) is None:
        pytest.skip(native.form(torch.device("cuda")))
