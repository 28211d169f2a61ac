"""Verdicts on several fixes together: what stacks, what clashes; orders and reviews."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.trees import VERSION, make_diff, make_fix
from tests.support.verdicts import (
    BOTH,
    CORE,
    FIRST,
    SECOND,
    edit_fix,
    hook_fix,
    one,
    tree_of,
)
from vllm_overlay.errors import ConfigError
from vllm_overlay.fix import Fix
from vllm_overlay.symbols import MODULE
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import judge, order, review_entry


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return tree_of(tmp_path / "tree", CORE)


def verdicts(fixes: Sequence[Fix], tree: Tree) -> list[str]:
    return [judged.verdict for judged in judge(fixes, tree)]


def test_two_edits_of_one_module(tmp_path: Path, tree: Tree) -> None:
    one_, two = (edit_fix(tmp_path, n, t, reviewed=[s]) for n, t, s in
                 (("a", FIRST, "first"), ("b", SECOND, "second")))  # fmt: skip
    judged = judge([one_, two], tree)
    assert [j.verdict for j in judged] == ["conflict", "conflict"]
    assert judged[0].reasons == ("vllm.v1.core is changed by b too, and neither declares after",)
    assert judged[1].reasons == ("vllm.v1.core is changed by a too, and neither declares after",)
    assert judged[0].patched == judged[1].patched == {}


def test_edits_stack_in_the_order_of_after(tmp_path: Path, tree: Tree) -> None:
    base = edit_fix(tmp_path, "a", FIRST, reviewed=["first"])
    twice = FIRST.replace("x + 10", "x + 100")
    on_top = edit_fix(tmp_path, "b", twice, old=FIRST, reviewed=["first"], after=["a"])
    judged = judge([base, on_top], tree)
    assert [j.verdict for j in judged] == ["apply", "apply"]  # digests are of the original
    assert judged[1].patched == {"vllm.v1.core": twice.encode()}
    assert verdicts([on_top], tree) == ["incompatible"]
    third = edit_fix(tmp_path, "c", twice.replace("x + 2", "x"), old=twice, reviewed=["second"],
                     after=["b"])  # fmt: skip
    assert verdicts([base, on_top, third], tree) == ["apply"] * 3


def test_what_does_not_apply_clashes_with_nothing(tmp_path: Path) -> None:
    carried = tree_of(tmp_path / "t", FIRST)
    upstream = edit_fix(tmp_path, "a", FIRST, reviewed=["first"])
    too_new = hook_fix(tmp_path, "b", ["second"], vllm=">99")
    applies = edit_fix(tmp_path, "c", BOTH, old=FIRST, reviewed=["second"])
    found = verdicts([upstream, too_new, applies], carried)
    assert found == ["upstreamed", "incompatible", "apply"]


def test_a_symbol_that_the_one_before_adds_is_reviewed_in_its_text(
    tmp_path: Path, tree: Tree
) -> None:
    added = CORE + "\n\ndef third(x):\n    return x + 3\n"
    base = edit_fix(tmp_path, "a", added, reviewed=["Engine"])
    digest = tree_of(tmp_path / "added", added).symbols("vllm.v1.core")["third"]
    for name, recorded, verdict in (("b", digest, "apply"), ("c", "0" * 64, "incompatible")):
        on_top = make_fix(
            tmp_path / "f",
            name,
            {"x.diff": make_diff(added, added.replace("x + 3", "x"), "v1/core.py")},
            edits={"vllm.v1.core": "x.diff"},
            after=["a"],
            reviewed={VERSION: {"vllm.v1.core": {"third": recorded}}},
        )
        assert verdicts([base, on_top], tree) == ["apply", verdict]


def test_a_symbol_that_the_one_before_adds_can_be_changed(tmp_path: Path, tree: Tree) -> None:
    added = CORE + "\n\ndef third(x):\n    return x + 3\n"
    base = edit_fix(tmp_path, "a", added, reviewed=["Engine"])
    on_top = edit_fix(tmp_path, "b", added.replace("x + 3", "x"), old=added, after=["a"],
                      reviewed=["Engine"])  # fmt: skip
    assert verdicts([base, on_top], tree) == ["apply", "apply"]


def test_what_comes_after_a_fix_that_does_not_apply(tmp_path: Path, tree: Tree) -> None:
    base = edit_fix(tmp_path, "a", FIRST, vllm="<9", reviewed=["first"])
    on_top = edit_fix(tmp_path, "b", SECOND, reviewed=["second"], after=["a"])
    judged = judge([base, on_top], tree)
    assert [j.verdict for j in judged] == ["incompatible", "incompatible"]
    assert judged[1].reasons == ("vllm.v1.core: it comes after a, which is incompatible",)


def test_after_one_that_is_upstream(tmp_path: Path) -> None:
    carried = tree_of(tmp_path / "t", FIRST)
    base = edit_fix(tmp_path, "a", FIRST, reviewed=["first"])
    on_top = edit_fix(tmp_path, "b", BOTH, old=FIRST, reviewed=["second"], after=["a"])
    assert verdicts([base, on_top], carried) == ["upstreamed", "apply"]


@pytest.mark.parametrize(
    ("mine", "theirs", "verdict"),
    [
        ("first", "first", "conflict"),
        ("Engine.step", "Engine", "conflict"),
        ("Engine", "Engine.step", "conflict"),
        ("first", MODULE, "conflict"),
        ("Engine.step", "Engine.stop", "apply"),
        ("first", "second", "apply"),
    ],
)
def test_two_hooks_and_one_symbol(
    tmp_path: Path, tree: Tree, mine: str, theirs: str, verdict: str
) -> None:
    one_, two = hook_fix(tmp_path, "a", [mine]), hook_fix(tmp_path, "b", [theirs])
    assert verdicts([one_, two], tree) == [verdict, verdict]
    later = hook_fix(tmp_path, "c", [theirs], after=["a"])
    assert verdicts([one_, later], tree) == ["apply", "apply"]


def test_an_edit_and_a_hook(tmp_path: Path, tree: Tree) -> None:
    edit = edit_fix(tmp_path, "a", FIRST.replace("import os", "import os, sys"), reviewed=["first"])
    assert verdicts([edit, hook_fix(tmp_path, "b", ["first"])], tree) == ["conflict", "conflict"]
    assert verdicts([edit, hook_fix(tmp_path, "c", ["second"])], tree) == ["apply", "apply"]


def test_one_new_module_of_two_fixes(tmp_path: Path, tree: Tree) -> None:
    body: dict[str, Any] = {"modules": {"vllm.v1.new": "m.py"}}
    fixes = [make_fix(tmp_path / "f", name, {"m.py": ""}, **body) for name in ("a", "b")]
    assert verdicts(fixes, tree) == ["conflict", "conflict"]


def test_order(tmp_path: Path) -> None:
    def fix(name: str, *after: str) -> Fix:
        return hook_fix(tmp_path, name, after=list(after))

    c, a, b, d = fix("c", "b"), fix("a"), fix("b", "a", "absent"), fix("d")
    assert [f.name for f in order([c, a, b, d])] == ["a", "b", "c", "d"]
    assert [f.name for f in order([d, b, a])] == ["d", "a", "b"]
    x, y, z = fix("x", "y"), fix("y", "z"), fix("z", "y")
    with pytest.raises(ConfigError, match=r"found after: y -> z -> y"):
        order([a, x, y, z])


# --- review ---


def test_a_review_entry_makes_a_fix_apply(tmp_path: Path, tree: Tree) -> None:
    fix = edit_fix(tmp_path, "a", BOTH)
    entry = review_entry(fix, tree)
    symbols = tree.symbols("vllm.v1.core")
    assert entry == {"vllm.v1.core": {name: symbols[name] for name in ("first", "second")}}
    reviewed = make_fix(
        tmp_path / "g", "a", {"core.diff": make_diff(CORE, BOTH, "v1/core.py")},
        edits={"vllm.v1.core": "core.diff"}, reviewed={VERSION: entry},
    )  # fmt: skip
    assert one(reviewed, tree).verdict == "apply"


def test_a_review_keeps_the_names_and_misses_none(tmp_path: Path) -> None:
    changed = tree_of(tmp_path / "t", CORE.replace("x + 1", "x + 5"))
    fix = hook_fix(tmp_path, "a", ["first", "Engine"])
    symbols = changed.symbols("vllm.v1.core")
    assert review_entry(fix, changed) == {
        "vllm.v1.core": {"Engine": symbols["Engine"], "first": symbols["first"]}
    }
    gone = tree_of(tmp_path / "u", CORE.replace("def first", "def other"))
    with pytest.raises(ConfigError, match=r"first does not exist in vLLM 9\.9\.0"):
        review_entry(fix, gone)
