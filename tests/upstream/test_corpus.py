"""Every Python file that differs between two releases, as a fix, judged on every release.

git is the judge of the judge: `apply` where `git apply --check` takes the diff, `upstreamed` where
its reverse does, `incompatible` where neither; where git takes both, either of the two. What is
applied must be the same bytes as git's.

Two rules meet here: "each hunk has exactly one place" and "as git says". git puts a hunk that fits
in several places where it is nearest to the line that it states. So do we, but what git guesses we
prove: by the order of the hunks, by the shift of the hunks next to it, by its own line, or by the
reviewed symbol that it must be in. A hunk that fits two places of one symbol and states the line of
neither is refused. On these releases that makes no difference to git; each one would be shown.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.corpus import Change, changes, git_applies, git_patched, verdict
from tests.upstream.conftest import RELEASES, release
from vllm_overlay.diffs import apply, parse
from vllm_overlay.upstream import Tree

PAIRS = [*pairwise(RELEASES)][1:3]
WANTED = {  # whether git applies it, and its reverse
    (True, False): {"apply"},
    (False, True): {"upstreamed"},
    (False, False): {"incompatible"},
    (True, True): {"apply", "upstreamed"},
}


def corpus_of(pair: tuple[str, str], folder: Path) -> list[Change]:
    old, new = (release(version) for version in pair)
    return changes(old, new, folder)


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    count = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def corpus(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, str], list[Change]]:
    return request.param, corpus_of(request.param, tmp_path_factory.mktemp("diffs"))


def test_every_diff_is_exact(corpus: tuple[tuple[str, str], list[Change]]) -> None:
    pair, found = corpus
    for change in found:
        (part,) = parse(change.file.read_bytes(), change.path)
        assert apply(change.before, part, change.path) == change.after, change.path
        assert apply(change.after, part.reversed(), change.path) == change.before, change.path
    assert len(found) > 500, pair


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", RELEASES)
def test_every_verdict_is_git_s(
    corpus: tuple[tuple[str, str], list[Change]],
    version: str,
    workers: ProcessPoolExecutor,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pair, found = corpus
    tree = release(version)
    tree = Tree(tree.root, tree.version, tmp_path_factory.getbasetemp() / "digests")
    forward = git_applies(found, tree.root)
    reverse = git_applies(found, tree.root, reverse=True)
    applied = git_patched([c for c in found if c.path in forward], tree.root, tmp_path)
    disagreements = []
    for result in workers.map(partial(verdict, tree=tree), found, chunksize=16):
        wanted = WANTED[result.path in forward, result.path in reverse]
        if version in pair:  # both sides are known for certain
            wanted = {"apply" if version == pair[0] else "upstreamed"}
        if result.verdict not in wanted:
            disagreements.append((result.path, result.verdict, wanted, result.reasons))
        elif result.verdict == "apply" and result.patched != applied[result.path]:
            disagreements.append((result.path, "other bytes than git's", set(), ()))
    shown = "\n".join(map(str, disagreements))
    assert not disagreements, f"{len(disagreements)} of {len(found)} differ from git:\n{shown}"
