"""An edit that fits in several places: taken only if the review tells them apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trees import VERSION, make_diff, make_fix, make_tree
from vllm_overlay.fix import Fix
from vllm_overlay.verdict import judge

BODY = "".join(f"        x{n} = {n}\n" for n in range(9))
CLASSES = f"class A:\n    def run(self):\n{BODY}\n\nclass B:\n    def run(self):\n{BODY}"
LONG = f"class A:\n    def run(self):\n{BODY}{BODY}"
OLD = "        x4 = 4\n"
NEW = "        x4 = 5\n"


def last_changed(text: str) -> str:
    before, _, after = text.rpartition(OLD)
    return before + NEW + after


def fix_of(tmp_path: Path, source: str, symbol: str) -> Fix:
    """A fix of the last place of ``OLD`` that was reviewed for what stands in ``source``."""
    digest = make_tree(tmp_path / "reviewed", {"core.py": source}).symbols("vllm.core")[symbol]
    files = {"x.diff": make_diff(source, last_changed(source), "core.py")}
    reviewed = {VERSION: {"vllm.core": {symbol: digest}}}
    return make_fix(
        tmp_path / "fixes", "a", files, edits={"vllm.core": "x.diff"}, reviewed=reviewed
    )


def verdict(fix: Fix, tmp_path: Path, source: str) -> tuple[str, str]:
    """Return the verdict with the patched text or the reason."""
    tree = make_tree(tmp_path / f"tree-{len(source)}", {"core.py": source})
    (judged,) = judge([fix], tree)
    return judged.verdict, judged.patched.get("vllm.core", b"").decode() or judged.reasons[0]


def test_the_reviewed_symbol_tells_two_places_apart(tmp_path: Path) -> None:
    fix = fix_of(tmp_path, CLASSES, "B.run")
    for lines in (0, 1, 5):
        moved = "#\n" * lines + CLASSES
        assert verdict(fix, tmp_path, moved) == ("apply", last_changed(moved))
    verdict_, said = verdict(fix, tmp_path, "#\n" * 12 + CLASSES)  # A.run is where B.run was
    assert verdict_ == "incompatible"
    assert "vllm.core: A.run is changed but was not reviewed" in said


def test_two_places_in_one_symbol_are_refused(tmp_path: Path) -> None:
    fix = fix_of(tmp_path, LONG, "A.run")
    assert verdict(fix, tmp_path, LONG) == ("apply", last_changed(LONG))  # its line says which
    verdict_, said = verdict(fix, tmp_path, "#\n" + LONG)
    assert verdict_ == "incompatible"
    assert said.startswith("a/x.diff:3: hunk 1 fits two places of the same symbol of vllm.core; ")
    assert "found lines 14, 5; expected one" in said


METHOD = "    def run(self):\n        a = 1\n        b = 2\n        return a\n\n"
ADDED = METHOD.replace("run", "more")
CLASS = f"class A:\n    def first(self):\n        pass\n\n{METHOD}"


@pytest.mark.parametrize("lines", [1, 5])
@pytest.mark.parametrize(("old", "new"), [(CLASS, CLASS + ADDED), (CLASS + ADDED, CLASS)])
def test_a_symbol_that_comes_or_goes_tells_whether_the_change_is_there(
    tmp_path: Path, old: str, new: str, lines: int
) -> None:
    """Between equal lines, a method can be put in twice; it is there if it can be taken out."""
    end = "        a = 1\n        b = 2\n        return a\n\n\nX = 1\nY = 2\n"
    old, new = old + end, new + end
    reviewed = {"9.8.0": {"vllm.core": {"A.first": "0" * 64}}}
    fix = make_fix(
        tmp_path / "fixes", "a", {"x.diff": make_diff(old, new, "core.py")},
        edits={"vllm.core": "x.diff"}, reviewed=reviewed,
    )  # fmt: skip
    assert verdict(fix, tmp_path, "#\n" * lines + new)[0] == "upstreamed"
