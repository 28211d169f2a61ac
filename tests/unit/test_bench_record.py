"""What is kept of a measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_overlay.bench.record import save


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("python -m bench.x --save /a/folder --rows 8", "python -m bench.x --save --rows 8"),
        ("python -m bench.x --save --rows 8", "python -m bench.x --save --rows 8"),
        ("python -m bench.x --rows 8 --save", "python -m bench.x --rows 8 --save"),
    ],
)
def test_the_folder_of_the_results_is_not_kept(tmp_path: Path, given: str, kept: str) -> None:
    file = save("x", given, [{"ms": 1.0}], folder=tmp_path)
    assert json.loads(file.read_text())["command"] == kept
    assert save("x", given, [], folder=tmp_path) != file
