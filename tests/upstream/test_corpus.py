"""Every Python file that differs between two releases, as a diff: exact, and told apart."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from vllm_overlay.diffs import FileDiff, apply, parse, reverse_applies
from vllm_overlay.upstream import Tree


def differing(old: Tree, new: Tree) -> Iterator[tuple[FileDiff, bytes, bytes]]:
    """Yield git's diff of each changed file with both of its texts."""
    text = subprocess.run(
        ["git", "diff", "--no-index", "--no-renames", "--diff-filter=M",
         old.root / "vllm", new.root / "vllm"],
        capture_output=True,
    ).stdout  # fmt: skip
    for part in parse(text, "corpus.diff"):
        assert part.old_path is not None
        assert part.new_path is not None
        before, after = Path("/", part.old_path), Path("/", part.new_path)
        yield part, before.read_bytes(), after.read_bytes()


def test_every_change_between_releases_is_exact(old_release: Tree, new_release: Tree) -> None:
    count = 0
    for part, before, after in differing(old_release, new_release):
        assert apply(before, part, part.path) == after, part.path
        assert apply(after, part.reversed(), part.path) == before, part.path
        assert reverse_applies(after, part), part.path
        assert not reverse_applies(before, part), part.path
        count += 1
    assert count > 800
