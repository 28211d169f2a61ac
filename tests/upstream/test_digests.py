"""Digests of real source: the same on every Python, blind to looks."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.pythons import pythons
from vllm_overlay.symbols import read_symbols
from vllm_overlay.upstream import Tree

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = 40  # every so manieth file


def sample(tree: Tree) -> list[Path]:
    return sorted((tree.root / "vllm").rglob("*.py"))[::SAMPLE]


@pytest.mark.parametrize("python", pythons(), ids=str)
def test_every_python_gives_the_same(python: Path, new_release: Tree) -> None:
    code = """if True:
        import json, sys
        from vllm_overlay.symbols import read_symbols
        for line in sys.stdin:
            with open(line.strip(), "rb") as file:
                print(json.dumps(read_symbols(file.read(), "m").whole))
    """
    files = sample(new_release)
    out = subprocess.run(
        [python, "-c", code], input="\n".join(map(str, files)), text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
    ).stdout.splitlines()  # fmt: skip
    assert len(out) == len(files) > 50
    for file, line in zip(files, out, strict=True):
        assert json.loads(line) == read_symbols(file.read_bytes(), "m").whole, file


def test_reformatted_source_has_the_same_digests(new_release: Tree) -> None:
    for file in sample(new_release):
        source = file.read_bytes()
        written_anew = ast.unparse(ast.parse(source)).encode()
        assert read_symbols(written_anew, "m").whole == read_symbols(source, "m").whole, file
