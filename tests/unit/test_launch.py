"""What `serve` does before it becomes vLLM, on a state folder and with plans of its own."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_overlay.recipe_format import CACHE_VARIABLES

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_overlay"


def test_the_cache_folders_are_listed_once() -> None:
    """Two lists would drift: a recipe could then set what `serve` takes from the cache key."""
    for name in CACHE_VARIABLES:
        quoted = re.compile(rf"\"{name}\"")
        files = [file.name for file in PACKAGE.rglob("*.py") if quoted.search(file.read_text())]
        assert files == ["recipe_format.py"]
