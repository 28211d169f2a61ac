"""Real changes between two releases as fixes: what a fix gives is the newer release's text."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.gitrepo import Repo
from vllm_overlay.fix import load_fix
from vllm_overlay.folders import home_folder
from vllm_overlay.newfix import new_fix
from vllm_overlay.reviewed import look
from vllm_overlay.scope import module_of
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import judge

FOLDERS = ("vllm/v1/core", "vllm/v1/engine", "vllm/v1/sample")
HOME = home_folder(os.environ)


def texts(tree: Tree) -> dict[str, bytes]:
    files = (file for folder in FOLDERS for file in (tree.root / folder).rglob("*.py"))
    return {str(file.relative_to(tree.root)): file.read_bytes() for file in files}


def test_a_release_s_changes_are_a_fix(
    old_release: Tree, new_release: Tree, tmp_path: Path
) -> None:
    old, new = texts(old_release), texts(new_release)
    repo = Repo(tmp_path / "repo", {**old, "tests/a.py": "a\n"})
    kept = {path: text for path, text in new.items() if path in old}
    for number, path in enumerate(sorted(kept)):  # one commit changes every other file
        repo.write({path: kept[path]} if number % 2 else {})
    repo.commit("One")
    repo.write({**new, "tests/a.py": "b\n"})
    repo.commit("Two")
    (tmp_path / "all.patch").write_bytes(repo.mails())
    fixes = tmp_path / "fixes"
    fixes.mkdir()
    made = new_fix("all", fixes, tmp_path / "all.patch", str(old_release.root), HOME)
    fix = load_fix(made.folder)
    (judged,) = judge([fix], old_release)
    assert judged.verdict == "apply"
    assert len(judged.patched) > 20
    left_out = {path for path, _ in made.left_out}
    for path, text in new.items():
        module = module_of(path)
        assert module is not None
        if path not in old:
            assert fix.modules[module].read_bytes() == text
        elif text != old[path] and path not in left_out:
            assert judged.patched[module] == text, path
    assert made.review is not None
    assert fix.reviewed == {old_release.release: made.review.entry}
    assert look([fix], new_release, HOME).upstreamed
