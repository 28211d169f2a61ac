"""The lines of a symbol, and how they differ between two trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trees import make_tree
from vllm_overlay.sources import difference, symbol_lines

TEXT = """import a

if a:

    @a.b
    def f():
        return 1

else:

    def f():
        return 2


X, (Y, *Z) = (
    1,
    2,
)


class C:
    x: int = 0

    def m(self):
        x = 1
"""


@pytest.mark.parametrize(
    ("symbol", "lines"),
    [
        ("f", ["    @a.b", "    def f():", "        return 1", "    def f():", "        return 2"]),
        ("Z", ["X, (Y, *Z) = (", "    1,", "    2,", ")"]),
        ("C.x", ["    x: int = 0"]),
        ("C.m", ["    def m(self):", "        x = 1"]),
        ("C.m.x", None),
        ("g", None),
        ("<module>", TEXT.split("\n")),
    ],
)
def test_the_lines_of_a_symbol(symbol: str, lines: list[str] | None, tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"m.py": TEXT})
    assert symbol_lines(tree, "vllm.m", symbol) == lines


def test_windows_lines_are_counted_alike(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {})
    (tmp_path / "vllm/m.py").write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert symbol_lines(tree, "vllm.m", "C.x") == ["    x: int = 0"]
    assert symbol_lines(tree, "vllm.none", "C.x") is None


def test_the_difference_names_both_releases(tmp_path: Path) -> None:
    old = make_tree(tmp_path / "old", {"m.py": TEXT}, "9.9.0")
    new = make_tree(tmp_path / "new", {"m.py": TEXT.replace("x = 1", "x = 2")}, "9.10.0")
    assert difference(old, new, "vllm.m", "C.m") == [
        "--- vLLM 9.9.0 C.m",
        "+++ vLLM 9.10.0 C.m",
        "@@ -1,2 +1,2 @@",
        "     def m(self):",
        "-        x = 1",
        "+        x = 2",
    ]
    assert difference(old, new, "vllm.m", "f") == []
