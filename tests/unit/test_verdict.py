"""Verdicts on one fix: what applies, what is upstream, what no longer fits."""

from __future__ import annotations

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
    reasons,
    tree_of,
)
from vllm_overlay.symbols import MODULE
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import judge


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return tree_of(tmp_path / "tree", CORE)


# --- apply ---


def test_an_edit_that_fits_applies(tmp_path: Path, tree: Tree) -> None:
    judged = one(edit_fix(tmp_path, "a", FIRST, reviewed=["first"]), tree)
    assert (judged.verdict, judged.reasons) == ("apply", ())
    assert judged.patched == {"vllm.v1.core": FIRST.encode()}
    (target,) = judged.targets
    assert (target.kind, target.module, target.symbols) == ("edit", "vllm.v1.core", ("first",))
    (edit,) = judged.evidence["edits"]
    assert edit["hunks"] == [{"number": 1, "line": 3, "forward": 5, "reverse": None}]
    assert judged.evidence["symbols"][0]["symbol"] == "first"


def test_shifted_lines_and_comments_do_not_matter(tmp_path: Path) -> None:
    moved = tree_of(tmp_path / "t", "# new\n" * 9 + CORE.replace("# far", "# near"))
    judged = one(edit_fix(tmp_path, "a", FIRST, reviewed=["first"]), moved)
    assert judged.verdict == "apply"
    assert judged.patched["vllm.v1.core"].startswith(b"# new\n" * 9)


def test_a_hook_that_fits_applies(tmp_path: Path, tree: Tree) -> None:
    judged = one(hook_fix(tmp_path, "a", ["Engine.step"]), tree)
    assert (judged.verdict, judged.reasons) == ("apply", ())
    assert judged.targets[0].symbols == ("Engine.step",)


def test_new_modules_need_their_package(tmp_path: Path, tree: Tree) -> None:
    files = {"m.py": "X = 1\n", "__init__.py": ""}
    new = {"vllm.v1.new": "m.py", "vllm.pack": "__init__.py", "vllm.pack.inner": "m.py"}
    assert one(make_fix(tmp_path / "f", "a", files, modules=new), tree).verdict == "apply"
    lost = {"vllm.none.new": "m.py", "vllm.v1.core": "m.py", "vllm.v1": "m.py"}
    said = reasons(make_fix(tmp_path / "f", "b", files, modules=lost), tree)
    assert said == (
        "vllm.none.new: its package vllm.none does not exist in vLLM 9.9.0",
        "vllm.v1.core: vLLM 9.9.0 has a module of this name",
        "vllm.v1: vLLM 9.9.0 has a module of this name",
    )


def test_a_fix_may_hook_the_module_of_the_one_before(tmp_path: Path, tree: Tree) -> None:
    new = make_fix(tmp_path / "f", "a", {"m.py": ""}, modules={"vllm.v1.new": "m.py"})
    hooks = {"vllm.v1.new": "h.py:go"}
    assert (
        judge([new, hook_fix(tmp_path, "b", hooks=hooks, after=["a"])], tree)[1].verdict == "apply"
    )
    assert judge([new, hook_fix(tmp_path, "c", hooks=hooks)], tree)[1].verdict == "incompatible"


# --- incompatible ---


@pytest.mark.parametrize("old", ["x + 1", "total = x", "return total"])
def test_a_reviewed_symbol_that_changed_is_named(tmp_path: Path, tree: Tree, old: str) -> None:
    changed = tree_of(tmp_path / "t", CORE.replace(old, f"{old}0", 1))
    before, after = (t.symbols("vllm.v1.core")["first"][:12] for t in (tree, changed))
    said = "vllm.v1.core: first is not what was reviewed for vLLM 9.9.0: "
    said += f"reviewed {before}, found {after}"
    assert reasons(hook_fix(tmp_path, "a", ["first"]), changed) == (said,)


def test_a_reviewed_symbol_that_is_gone_is_named(tmp_path: Path) -> None:
    renamed = tree_of(tmp_path / "t", CORE.replace("def first", "def first_one"))
    (said,) = reasons(hook_fix(tmp_path, "a", ["first"]), renamed)
    assert said.startswith("vllm.v1.core: first does not exist in vLLM 9.9.0; reviewed ")
    assert said.endswith("did you mean 'first_one'?")


def test_a_release_that_was_not_reviewed(tmp_path: Path, tree: Tree) -> None:
    fix = edit_fix(tmp_path, "a", FIRST)
    said = "not reviewed for vLLM 9.9.0 (reviewed: no release); run vllm-overlay review a"
    assert reasons(fix, tree) == (said,)
    other = tree_of(tmp_path / "t", CORE.replace("import os", "import sys"))
    other = Tree(other.root, "9.10.0")
    fix = edit_fix(tmp_path, "b", FIRST, reviewed=["first"])
    said = "not reviewed for vLLM 9.10.0 (reviewed: 9.9.0); run vllm-overlay review b"
    assert reasons(fix, other) == (said,)


def test_the_local_part_of_a_version_is_no_other_release(tmp_path: Path, tree: Tree) -> None:
    fix = edit_fix(tmp_path, "a", FIRST, reviewed=["first"])
    assert one(fix, Tree(tree.root, "9.9+cpu")).verdict == "apply"
    (said,) = reasons(fix, Tree(tree.root, "9.9.0rc1"))  # another one, though in the range
    assert said.startswith("not reviewed for vLLM 9.9.0rc1")


def test_a_version_outside_of_the_range(tmp_path: Path, tree: Tree) -> None:
    fix = edit_fix(tmp_path, "a", FIRST, reviewed=["first"], vllm="<9")
    assert reasons(fix, tree) == ("vLLM 9.9.0 is outside of the fix's range <9",)


def test_every_symbol_that_an_edit_changes_must_be_reviewed(tmp_path: Path, tree: Tree) -> None:
    digest = tree.symbols("vllm.v1.core")["second"]
    fix = edit_fix(tmp_path, "a", BOTH, reviewed=["first"])
    said = "vllm.v1.core: second is changed but was not reviewed for vLLM 9.9.0; its digest is "
    assert reasons(fix, tree) == (said + digest,)
    assert one(edit_fix(tmp_path, "b", BOTH, reviewed=[MODULE]), tree).verdict == "apply"
    step = CORE.replace("return 1", "return 2")
    assert one(edit_fix(tmp_path, "c", step, reviewed=["Engine"]), tree).verdict == "apply"
    assert one(edit_fix(tmp_path, "d", step, reviewed=["Engine.step"]), tree).verdict == "apply"
    assert one(edit_fix(tmp_path, "e", step, reviewed=["Engine.stop"]), tree).verdict != "apply"


def test_a_target_without_any_reviewed_symbol_is_refused(tmp_path: Path, tree: Tree) -> None:
    said = ("vllm.v1.core: no symbol of it was reviewed for vLLM 9.9.0",)
    assert reasons(hook_fix(tmp_path, "a"), tree) == said
    imports = CORE.replace("import os", "import sys")
    assert reasons(edit_fix(tmp_path, "b", imports, reviewed=[]), tree) == said


def test_what_an_edit_adds_needs_no_review(tmp_path: Path, tree: Tree) -> None:
    new = FIRST.replace("import os", "import os\nimport sys") + "\n    def more(self): pass\n"
    judged = one(edit_fix(tmp_path, "a", new, reviewed=["first"]), tree)
    assert judged.verdict == "apply"
    assert judged.targets[0].symbols == ("Engine.more", "first")


@pytest.mark.parametrize("kind", ["edits", "hooks"])
def test_a_target_that_does_not_exist(tmp_path: Path, tree: Tree, kind: str) -> None:
    if kind == "edits":
        fix = edit_fix(tmp_path, "a", FIRST, reviewed=[], edits={"vllm.v1.cora": "core.diff"})
    else:
        fix = hook_fix(tmp_path, "a", hooks={"vllm.v1.cora": "h.py:go"})
    said = "vllm.v1.cora: no such module in vLLM 9.9.0; did you mean 'vllm.v1.core'?"
    assert reasons(fix, tree) == (said,)


def test_a_diff_that_does_not_match_says_where(tmp_path: Path) -> None:
    changed = tree_of(tmp_path / "t", CORE.replace("total = x + 1", "total = x + 3"))
    fix = edit_fix(tmp_path, "a", FIRST, reviewed=["second"])
    (said,) = reasons(fix, changed)
    assert said.startswith("a/core.diff:3: hunk 1 does not match vllm.v1.core; found its lines now")


def test_the_diff_must_be_of_that_module_and_of_it_alone(tmp_path: Path, tree: Tree) -> None:
    for name, text, said in (
        ("a", make_diff(CORE, FIRST, "v1/other.py"), "the diff is for another file"),
        ("b", make_diff(CORE, FIRST, "v1/core.py") * 2, "the diff changes several files"),
        ("c", make_diff("", FIRST, "v1/core.py").replace("--- a/vllm/v1/core.py", "--- /dev/null"),
         "found /dev/null -> vllm/v1/core.py"),
        ("d", "nonsense", "no unified diff found"),
    ):  # fmt: skip
        fix = make_fix(
            tmp_path / "f", name, {"x.diff": text}, edits={"vllm.v1.core": "x.diff"},
            reviewed={VERSION: {"vllm.v1.core": {"LIMIT": tree.symbols("vllm.v1.core")["LIMIT"]}}},
        )  # fmt: skip
        (found,) = reasons(fix, tree)
        assert found.startswith(f"{name}/x.diff: ")
        assert said in found


def test_an_edit_that_breaks_the_source_is_refused(tmp_path: Path, tree: Tree) -> None:
    fix = edit_fix(tmp_path, "a", CORE.replace("x + 1", "x +"), reviewed=["first"])
    (said,) = reasons(fix, tree)
    assert said == "vllm.v1.core with a/core.diff:8: the source does not parse: invalid syntax"


def test_a_diff_that_applies_in_reverse_is_upstream(tmp_path: Path) -> None:
    fix = edit_fix(tmp_path, "a", BOTH, reviewed=["first"], vllm="<9")  # whatever its range
    said = reasons(fix, tree_of(tmp_path / "t", "# new\n" + BOTH), "upstreamed")
    assert said == ("vLLM 9.9.0 carries it: every hunk applies in reverse (2)",)


def test_partly_upstream_is_not_upstream(tmp_path: Path) -> None:
    carried = tree_of(tmp_path / "t", FIRST)
    fix = edit_fix(tmp_path, "a", BOTH, reviewed=["second"])
    said = "partly upstream: vLLM 9.9.0 has hunk 1 of a/core.diff, but not hunk 2 of a/core.diff"
    assert reasons(fix, carried) == (said,)
    hooks = {"vllm.v1.core": "h.py:go"}
    files = {"x.diff": make_diff(CORE, FIRST, "v1/core.py"), "h.py": "def go(module): pass\n"}
    edits = {"vllm.v1.core": "x.diff"}
    reviewed = {VERSION: {"vllm.v1.core": {"second": carried.symbols("vllm.v1.core")["second"]}}}
    mixed = make_fix(tmp_path / "f", "b", files, edits=edits, hooks=hooks, reviewed=reviewed)
    said = "has hunk 1 of b/x.diff, but not the hook on vllm.v1.core"
    assert reasons(mixed, carried) == (f"partly upstream: vLLM 9.9.0 {said}",)


def test_one_edit_upstream_and_another_not(tmp_path: Path) -> None:
    tree = tree_of(tmp_path / "t", FIRST, **{"v1/other.py": CORE})
    digest = tree.symbols("vllm.v1.other")["second"]
    fix = make_fix(
        tmp_path / "f",
        "a",
        {
            "core.diff": make_diff(CORE, FIRST, "v1/core.py"),
            "other.diff": make_diff(CORE, SECOND, "v1/other.py"),
        },
        edits={"vllm.v1.core": "core.diff", "vllm.v1.other": "other.diff"},
        reviewed={VERSION: {"vllm.v1.other": {"second": digest}}},
    )
    said = "has hunk 1 of a/core.diff, but not hunk 1 of a/other.diff"
    assert reasons(fix, tree) == (f"partly upstream: vLLM 9.9.0 {said}",)


def test_new_modules_upstream(tmp_path: Path) -> None:
    carried = tree_of(tmp_path / "t", FIRST, **{"v1/new.py": "X = 1  # theirs\n"})
    files = {"x.diff": make_diff(CORE, FIRST, "v1/core.py"), "new.py": "X = 1\n"}
    body: dict[str, Any] = {
        "edits": {"vllm.v1.core": "x.diff"},
        "modules": {"vllm.v1.new": "new.py"},
    }
    assert one(make_fix(tmp_path / "f", "a", files, **body), carried).verdict == "upstreamed"
    files["new.py"] = "X = 2\n"
    said = reasons(make_fix(tmp_path / "f", "b", files, **body), carried)
    assert "partly upstream: vLLM 9.9.0 has hunk 1 of b/x.diff, but not vllm.v1.new" in said


def test_recorded_digests_prove_it_too(tmp_path: Path) -> None:
    carried = tree_of(tmp_path / "t", FIRST)
    digest = carried.symbols("vllm.v1.core")["first"]
    proof = {VERSION: {"vllm.v1.core": {"first": digest}}}
    said = "vLLM 9.9.0 carries it: the symbols are those recorded as upstreamed"
    assert reasons(hook_fix(tmp_path, "a", upstreamed=proof), carried, "upstreamed") == (said,)
    wrong = {VERSION: {"vllm.v1.core": {"first": digest, "second": digest}}}
    assert one(hook_fix(tmp_path, "b", upstreamed=wrong), carried).verdict == "incompatible"
    other = {"9.9.1": proof[VERSION]}
    assert one(hook_fix(tmp_path, "c", upstreamed=other), carried).verdict == "incompatible"


RUN = "A = [\n" + "    1,\n" * 20 + "]\n"


def test_a_change_that_fits_both_ways(tmp_path: Path) -> None:
    """One more of many equal lines: it can always be put in, and always be taken out."""
    more = RUN.replace("    1,\n]", "    1,\n    1,\n]")
    old, new = tree_of(tmp_path / "old", RUN), tree_of(tmp_path / "new", more)
    shifted = tree_of(tmp_path / "shifted", "#\n" + RUN)
    lost = tree_of(tmp_path / "lost", "#\n" * 9 + RUN)
    files = {"x.diff": make_diff(RUN, more, "v1/core.py")}
    reviewed = {VERSION: {"vllm.v1.core": {"A": old.symbols("vllm.v1.core")["A"]}}}
    edits = {"vllm.v1.core": "x.diff"}
    known = make_fix(tmp_path / "f", "known", files, edits=edits, reviewed=reviewed)
    for tree, verdict in ((old, "apply"), (shifted, "apply"), (lost, "apply"), (new, "upstreamed")):
        assert one(known, tree).verdict == verdict
    unknown = make_fix(tmp_path / "f", "unknown", files, edits=edits)
    assert one(unknown, new).verdict == "upstreamed"
    said = "unknown/x.diff: it applies to vllm.v1.core both forward and in reverse"
    assert reasons(unknown, lost)[0] == said
