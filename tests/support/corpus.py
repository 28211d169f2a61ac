"""Every Python file that differs between two releases as a fix, and git's word on each."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_overlay.errors import ConfigError
from vllm_overlay.fix import Fix
from vllm_overlay.reviewed import look
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import judge
from vllm_overlay.yamlio import Places, parse

NO_PLACES = Places(parse(b"{}", Path("fix.yaml"))[0])


@dataclass(frozen=True)
class Change:
    """What git says that a file of vLLM became between two releases; ``file`` holds the diff."""

    path: str
    file: Path
    before: bytes
    after: bytes

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def fix(self) -> Fix:
        return Fix(
            name="corpus", summary="", source="", flag=None, vllm=">=0", after=(), modules={},
            edits={self.module: self.file}, hooks={}, needs=(), reviewed={}, upstreamed={},
            folder=self.file.parent, file=self.file.parent / "fix.yaml", places=NO_PLACES,
        )  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What we say of one change on one release, and the file that we would make of it."""

    path: str
    verdict: str
    reasons: tuple[str, ...]
    patched: bytes | None


def changes(old: Tree, new: Tree, folder: Path) -> list[Change]:
    """Return every file that is in both trees and differs, its diff written below ``folder``."""
    command = ["git", "diff", "--no-index", "--no-renames", "--diff-filter=M", "--no-color"]
    roots = [str(tree.root / "vllm") for tree in (old, new)]
    text = subprocess.run([*command, *roots], capture_output=True, env=environ()).stdout
    found = []
    for part in re.split(rb"(?m)^(?=diff --git )", text)[1:]:
        if b"\n+++ b" not in part:
            continue  # compiled files, which a run of the release has left beside its own
        for mark, root in zip((b"a", b"b"), roots, strict=True):
            part = part.replace(mark + root.encode() + b"/", mark + b"/vllm/")
        path = re.findall(rb"(?m)^\+\+\+ b/(.*)$", part)[0].decode()
        file = folder / f"{len(found)}.diff"
        file.write_bytes(part)
        before, after = (Path(tree.root, path).read_bytes() for tree in (old, new))
        found.append(Change(path, file, before, after))
    return found


def environ() -> dict[str, str]:
    """git's environment: no repository around, no settings of the user, no translations."""
    own = {"GIT_CEILING_DIRECTORIES": "/", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}
    return {**os.environ, "GIT_CONFIG_NOSYSTEM": "1", **own}


def git_applies(found: Sequence[Change], root: Path, *, reverse: bool = False) -> set[str]:
    """Return the paths whose diff `git apply --check` takes in the tree ``root``."""
    text = b"".join(change.file.read_bytes() for change in found)
    command = ["git", "apply", "--check", "--verbose", *(["--reverse"] if reverse else [])]
    run = subprocess.run(command, input=text, cwd=root, capture_output=True, env=environ())
    said = run.stderr.decode()
    checked = re.findall(r"(?m)^Checking patch (.*)\.\.\.$", said)
    assert sorted(checked) == sorted(change.path for change in found), said[-500:]
    refused = re.findall(r"(?m)^error: (?:patch failed: )?([^:\n]+\.py):", said)
    assert {*refused} <= {*checked}, said
    assert bool(refused) == bool(run.returncode), said[-500:]
    return {*checked} - {*refused}


def git_patched(found: Sequence[Change], root: Path, folder: Path) -> dict[str, bytes]:
    """Return what `git apply` makes of each file of the tree ``root``; every diff must apply."""
    for change in found:
        copy = folder / change.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(Path(root, change.path).read_bytes())
    if not found:
        return {}  # git has an error for an empty patch
    text = b"".join(change.file.read_bytes() for change in found)
    subprocess.run(["git", "apply"], input=text, cwd=folder, check=True, env=environ())
    return {change.path: Path(folder, change.path).read_bytes() for change in found}


def verdict(change: Change, tree: Tree) -> Result:
    """Judge a change as a fix that was reviewed for this very release if it can be."""
    fix = change.fix
    with contextlib.suppress(ConfigError):  # it does not apply: judged without a review
        fix = replace(fix, reviewed={tree.release: look([fix], tree, change.file.parent).entry})
    (judged,) = judge([fix], tree)
    patched = judged.patched.get(change.module)
    return Result(change.path, judged.verdict, judged.reasons, patched)
