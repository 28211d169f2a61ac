"""What `check` shows beside a verdict, and where it takes the text from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.trees import VERSION, make_tree
from tests.support.verdicts import BOTH, CORE, FIRST, edit_fix, hook_fix, tree_of
from vllm_overlay import releases
from vllm_overlay.errors import ConfigError
from vllm_overlay.evidence import short, with_evidence
from vllm_overlay.fix import Fix
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import Judged, judge

CHANGED = CORE.replace("x + 1", "x + 5").replace("# a comment", "# another")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A state folder that keeps the reviewed release."""
    tree_of(tmp_path / "home" / "releases" / VERSION, CORE)
    return tmp_path / "home"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    def refuse(version: str, root: Path) -> None:
        asked.append(version)
        raise ConfigError(f"vLLM {version} cannot be fetched")

    monkeypatch.setattr(releases, "_fetch", refuse)
    return asked


def explained(fix: Fix, tree: Tree, home: Path) -> Judged:
    (judged,) = with_evidence(judge([fix], tree), tree, home)
    json.dumps(judged.evidence)
    assert all("\n" not in line for line in short(judged))
    return judged


def changed(fix: Fix, tree: Tree, home: Path) -> dict[str, Any]:
    judged = explained(fix, tree, home)
    assert judged.verdict == "incompatible"
    (row,) = judged.evidence["changed"]
    return dict(row)


def test_the_difference_since_the_review_is_shown(tmp_path: Path, home: Path) -> None:
    tree = tree_of(tmp_path / "t", CHANGED)
    fix = hook_fix(tmp_path, "a", ["first", "second"])
    row = changed(fix, tree, home)
    assert (row["module"], row["symbol"], row["reviewed"]) == ("vllm.v1.core", "first", VERSION)
    assert (row["recorded"], row["found"]) == (
        fix.reviewed[VERSION]["vllm.v1.core"]["first"],
        tree.symbols("vllm.v1.core")["first"],
    )
    assert row["diff"][3:] == [
        " def first(x):",
        "-    # a comment",
        "-    total = x + 1",
        "+    # another",
        "+    total = x + 5",
        "     return total",
    ]
    assert row["note"] is None
    assert short(explained(fix, tree, home)) == [
        f"vllm.v1.core: first since vLLM {VERSION}:",
        "  -    # a comment",
        "  -    total = x + 1",
        "  +    # another",
        "  +    total = x + 5",
    ]


def test_an_unreviewed_release_is_compared_with_the_newest_reviewed(
    tmp_path: Path, home: Path, no_network: list[str]
) -> None:
    tree = Tree(tree_of(tmp_path / "t", CHANGED).root, "9.10.0")
    fix = hook_fix(tmp_path, "a", ["first"])
    older = {"9.8.0": {"vllm.v1.core": {"second": "0" * 64}}}
    fix = replace(fix, reviewed={**older, **fix.reviewed})
    assert "+    total = x + 5" in changed(fix, tree, home)["diff"]
    assert no_network == []


def test_a_release_that_cannot_be_had_is_named(tmp_path: Path, no_network: list[str]) -> None:
    tree = tree_of(tmp_path / "t", CHANGED.replace("x + 2", "x + 6"))
    judged = explained(hook_fix(tmp_path, "a", ["first", "second"]), tree, tmp_path / "empty")
    for row in judged.evidence["changed"]:
        assert row["diff"] == []
        assert row["note"] == (
            f"to see the difference, fetch vLLM {VERSION}: vllm-overlay check --vllm {VERSION} "
            f"(vLLM {VERSION} cannot be fetched)"
        )
    assert no_network == [VERSION]  # asked for once
    assert any(f"fetch vLLM {VERSION}" in line for line in short(judged))


def test_a_release_that_is_not_what_was_reviewed_shows_nothing(tmp_path: Path, home: Path) -> None:
    (home / "releases" / VERSION / "vllm" / "v1" / "core.py").write_text(FIRST)
    row = changed(hook_fix(tmp_path, "a", ["first"]), tree_of(tmp_path / "t", CHANGED), home)
    assert row["diff"] == []
    assert row["note"] == f"vLLM {VERSION} as released has another digest, too"


def test_the_new_place_of_a_symbol_is_found(tmp_path: Path, home: Path) -> None:
    moved = CORE.replace("def first", "def first_one")
    tree = make_tree(tmp_path / "t", {"v1/core.py": moved, "v1/other.py": f"import sys\n{CORE}"})
    tree = Tree(tree.root, tree.version, tmp_path / "cache")
    fix = hook_fix(tmp_path, "a", ["first"])
    row = changed(fix, tree, home)
    assert row["found"] is None
    assert row["moved_to"] == ["the same code is first of vllm.v1.other"]
    assert "-def first(x):" in row["diff"]
    assert "  the same code is first of vllm.v1.other" in short(explained(fix, tree, home))


def test_a_long_difference_is_cut_short_in_a_table(tmp_path: Path, home: Path) -> None:
    longer = CORE.replace("    # a comment\n", "".join(f"    y{n} = {n}\n" for n in range(30)))
    fix = hook_fix(tmp_path, "a", ["first"])
    judged = explained(fix, tree_of(tmp_path / "t", longer), home)
    assert short(judged)[-1] == "  … 27 more changed lines, see --json"
    assert len(judged.evidence["changed"][0]["diff"]) > 30


def test_hunks_that_are_upstream_are_shown(tmp_path: Path, home: Path) -> None:
    fix = edit_fix(tmp_path, "a", BOTH, reviewed=["first"])
    judged = explained(fix, tree_of(tmp_path / "t", "# new\n" + BOTH), home)
    assert judged.verdict == "upstreamed"
    (edit,) = judged.evidence["edits"]
    assert [hunk["number"] for hunk in edit["carried"]] == [1, 2]
    assert edit["carried"][0]["file_line"] == 6
    assert "+    total = x + 10" in edit["carried"][0]["text"]
    assert "-    total = x + 1" in edit["carried"][0]["text"]
    assert short(judged)[0] == "a/core.diff: hunk 1 is there, line 6"


def test_partly_upstream_shows_the_hunks_that_are_there(tmp_path: Path, home: Path) -> None:
    fix = edit_fix(tmp_path, "a", BOTH, reviewed=["second"])
    judged = explained(fix, tree_of(tmp_path / "t", FIRST), home)
    (edit,) = judged.evidence["edits"]
    assert [hunk["number"] for hunk in edit["carried"]] == [1]
    assert short(judged) == ["a/core.diff: hunk 1 is there, line 5"]


def test_recorded_digests_are_shown_beside_what_was_found(tmp_path: Path, home: Path) -> None:
    tree = tree_of(tmp_path / "t", FIRST)
    digest = tree.symbols("vllm.v1.core")["first"]
    first = f"vllm.v1.core: first is {digest[:12]}, as recorded"
    for name, more, last in (("a", {}, []), ("b", {"gone": "0123abce"}, ["missing"])):
        recorded = {VERSION: {"vllm.v1.core": {"first": digest, **more}}}
        judged = explained(hook_fix(tmp_path, name, upstreamed=recorded), tree, home)
        assert judged.verdict == ("incompatible" if more else "upstreamed")
        wanted = [f"vllm.v1.core: gone is {found}, recorded 0123abce" for found in last]
        assert [line for line in short(judged) if "recorded" in line] == [first, *wanted]
        assert judged.evidence["upstreamed"][0] == {
            "module": "vllm.v1.core", "symbol": "first", "recorded": digest, "found": digest,
        }  # fmt: skip


def test_what_applies_has_no_such_evidence(tmp_path: Path, no_network: list[str]) -> None:
    fix = edit_fix(tmp_path, "a", FIRST, reviewed=["first"])
    judged = explained(fix, tree_of(tmp_path / "t", CORE), tmp_path / "empty")
    assert judged.verdict == "apply"
    assert short(judged) == []
    assert no_network == []
