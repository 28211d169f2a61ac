"""Fixtures of the tests that need no vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sandbox import Sandbox, make_sandbox


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """A Python environment with the overlay and a made-up vLLM."""
    return make_sandbox(tmp_path / "env")
