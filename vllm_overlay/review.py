"""`review`: a person looks at what changed upstream under a fix, then its digests are recorded.

Only `reviewed` is written. `upstreamed`, the digests that prove that a release carries a fix whose
hunks cannot prove it, is a claim of its own and is written by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from vllm_overlay import manifest
from vllm_overlay.errors import UsageError, one_line
from vllm_overlay.releases import find_tree
from vllm_overlay.reviewed import Review, Row, load_with_ancestors, look

SHORT = 12  # digits of a digest
STYLES = {"+": "green", "-": "red", "@": "cyan"}


def review_fix(
    name: str, folder: Path, vllm: str | None, home: Path, *, yes: bool, as_json: bool
) -> int:
    """Show what changed, ask, and record the digests. Returns the exit status: 1 for a no.

    Raises UsageError where nobody can be asked and ``yes`` is not given.
    """
    fixes = load_with_ancestors(name, folder)
    review = look(fixes, find_tree(vllm, home), home)
    if as_json:
        print(json.dumps(review.as_dict(), indent=1))
    else:
        print_review(review)
    if review.upstreamed or review.recorded:
        return 0
    if not yes and not _agreed(review, ask=not as_json):
        print("nothing was recorded", file=sys.stderr)
        return 1
    manifest.record(review.fix.file, review.release, review.entry)
    if not as_json:
        print(f"recorded in {review.fix.file}")
    return 0


def _agreed(review: Review, *, ask: bool) -> bool:
    if not (ask and sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "a person must review a fix, and nobody can be asked here",
            remedy="run it on a terminal, or give --yes",
        )
    question = f"Does {review.fix.name} still do the right thing on vLLM {review.version}? [y/N] "
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def print_review(review: Review) -> None:
    """Print each symbol with its digests, and the source that changed."""
    console = Console(highlight=False)
    name, version = review.fix.name, review.version
    if review.upstreamed:
        console.print(Text(f"{name}: nothing to review: {review.upstreamed}"), soft_wrap=True)
        return
    compared = f"compared with vLLM {review.base}" if review.base else "reviewed for the first time"
    console.print(Text(f"{name} on vLLM {version}, {compared}"), soft_wrap=True)
    for row in review.rows:
        console.print(Text(_summary(row)), soft_wrap=True)
        for line in row.lines:
            console.print(Text(f"    {one_line(line)}", STYLES.get(line[:1], "")), soft_wrap=True)
        if row.note:
            console.print(Text(f"    {row.note}"), soft_wrap=True)
    if not review.in_range:
        what = f"vLLM {version} is outside of the fix's range {review.fix.vllm}: change 'vllm', too"
        console.print(Text(what), soft_wrap=True)
    if review.recorded:
        console.print(f"all of it is recorded for vLLM {review.release} already")


def _summary(row: Row) -> str:
    name = f"  {row.module}: {row.symbol}"
    if row.same:
        return f"{name}: the same, {row.found[:SHORT]}"
    if row.recorded is None:
        return f"{name}: new, {row.found[:SHORT]}"
    return f"{name}: reviewed {row.recorded[:SHORT]}, found {row.found[:SHORT]}"
