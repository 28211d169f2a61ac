"""A made-up module of vLLM, fixes of it, and their verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.trees import VERSION, make_diff, make_fix, make_tree
from vllm_overlay.fix import Fix
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import Judged, judge

CORE = """import os

LIMIT = 8


def first(x):
    # a comment
    total = x + 1
    return total


# far
# from
# it


def second(x):
    total = x + 2
    return total


class Engine:
    def step(self):
        return 1

    def stop(self):
        return 0
"""
FIRST = CORE.replace("x + 1", "x + 10")
SECOND = CORE.replace("x + 2", "x + 20")
BOTH = FIRST.replace("x + 2", "x + 20")


def tree_of(root: Path, core: str, **more: str) -> Tree:
    return make_tree(root, {"v1/__init__.py": "", "v1/core.py": core, **more})


def edit_fix(tmp_path: Path, name: str, new: str, *, old: str = CORE, **manifest: Any) -> Fix:
    """A fix that edits vllm.v1.core; ``reviewed`` gives names, and their digests are CORE's."""
    names = manifest.pop("reviewed", None)
    if names is not None:
        symbols = tree_of(tmp_path / "digests", CORE).symbols("vllm.v1.core")
        manifest["reviewed"] = {VERSION: {"vllm.v1.core": {name: symbols[name] for name in names}}}
    manifest.setdefault("edits", {"vllm.v1.core": "core.diff"})
    files = {"core.diff": make_diff(old, new, "v1/core.py")}
    return make_fix(tmp_path / "fixes", name, files, **manifest)


def hook_fix(tmp_path: Path, name: str, names: Sequence[str] = (), **manifest: Any) -> Fix:
    symbols = tree_of(tmp_path / "digests", CORE).symbols("vllm.v1.core")
    reviewed = {"vllm.v1.core": {name: symbols[name] for name in names}} if names else {}
    body = {"hooks": {"vllm.v1.core": "h.py:go"}, "reviewed": {VERSION: reviewed}, **manifest}
    code = "def go(module):\n    return {}\n"
    return make_fix(tmp_path / "fixes", name, {"h.py": code}, **body)


def one(fix: Fix, tree: Tree) -> Judged:
    (judged,) = judge([fix], tree)
    json.dumps(judged.evidence)
    assert all("\n" not in reason for reason in judged.reasons)
    return judged


def reasons(fix: Fix, tree: Tree, verdict: str = "incompatible") -> tuple[str, ...]:
    judged = one(fix, tree)
    assert judged.verdict == verdict
    assert judged.patched == {}
    return judged.reasons
