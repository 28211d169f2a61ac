"""What `check` shows beside a verdict: the source that changed since a fix was reviewed.

Only digests of it are kept with a fix. The text comes from the release that was reviewed, which is
fetched into the state folder if it is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_overlay.errors import ConfigError, one_line
from vllm_overlay.fix import Fix
from vllm_overlay.index import moved
from vllm_overlay.releases import find_tree
from vllm_overlay.sources import since_review
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import SHORT, Judged

SHOWN = 4  # changed lines of a symbol in a table, and changed symbols


def with_evidence(judged: Sequence[Judged], tree: Tree, home: Path) -> list[Judged]:
    """Add ``changed`` to the evidence of each incompatible fix: the reviewed symbols that this
    tree has differently, with the difference, or a note that says why there is none.

    ``home`` is the state folder. What cannot be fetched is a note and no error.
    """
    releases: dict[str, Tree | str] = {}
    return [
        replace(
            item, evidence={**item.evidence, "changed": _changed(item.fix, tree, home, releases)}
        )
        if item.verdict == "incompatible"
        else item
        for item in judged
    ]


def short(item: Judged) -> list[str]:
    """Return the evidence of a verdict as the first lines of it, for a table."""
    lines: list[str] = []
    changed = item.evidence.get("changed", [])
    for row in changed[:SHOWN]:
        lines.append(f"{row['module']}: {row['symbol']} since vLLM {row['reviewed']}:")
        lines += _first(row["diff"][2:])
        lines += [f"  {text}" for text in (row["note"], *row["moved_to"]) if text]
    if len(changed) > SHOWN:
        lines.append(f"… {len(changed) - SHOWN} more changed symbols, see --json")
    if item.verdict in ("upstreamed", "incompatible"):
        lines += _carrying(item)
    return lines


def _carrying(item: Judged) -> Iterator[str]:
    """Yield what speaks for this vLLM carrying the fix: recorded digests, and hunks in reverse."""
    for row in item.evidence["upstreamed"]:
        recorded, found = row["recorded"], row["found"] or "missing"
        beside = "as recorded" if found == recorded else f"recorded {recorded[:SHORT]}"
        yield f"{row['module']}: {row['symbol']} is {found[:SHORT]}, {beside}"
    for edit in item.evidence["edits"]:
        for hunk in edit["carried"]:
            yield f"{edit['diff']}: hunk {hunk['number']} is there, line {hunk['file_line']}"


def _first(diff: Sequence[str]) -> Iterator[str]:
    changed = [line for line in diff if line.startswith(("+", "-"))]
    yield from (f"  {one_line(line)}" for line in changed[:SHOWN])
    if len(changed) > SHOWN:
        yield f"  … {len(changed) - SHOWN} more changed lines, see --json"


def _changed(
    fix: Fix, tree: Tree, home: Path, releases: dict[str, Tree | str]
) -> list[dict[str, Any]]:
    """Compare with the review of this release; if there is none, with that of the newest."""
    own = next((key for key in fix.reviewed if Version(key) == Version(tree.release)), None)
    base = own or max(fix.reviewed, key=Version, default=None)
    rows = []
    for module, symbols in (fix.reviewed[base] if base else {}).items():
        known = tree.symbols(module)
        for symbol, recorded in symbols.items():
            if known.get(symbol) != recorded:
                row: dict[str, Any] = {"module": module, "symbol": symbol, "reviewed": base}
                row["recorded"] = recorded
                places = moved(tree, recorded, module) if symbol not in known else []
                row["found"] = known.get(symbol)
                row["moved_to"] = [f"the same code is {name} of {where}" for where, name in places]
                row["diff"], row["note"] = _difference(row, tree, _release(base, home, releases))
                rows.append(row)
    return rows


def _release(version: str | None, home: Path, releases: dict[str, Tree | str]) -> Tree | str:
    """Return a release, or why there is none; each is asked for once."""
    version = str(version)
    if version not in releases:
        try:
            releases[version] = find_tree(version, home)
        except ConfigError as error:
            releases[version] = (
                f"to see the difference, fetch vLLM {version}: "
                f"vllm-overlay check --vllm {version} ({error})"
            )
    return releases[version]


def _difference(
    row: dict[str, Any], tree: Tree, release: Tree | str
) -> tuple[list[str], str | None]:
    if isinstance(release, str):
        return [], release
    try:
        lines, note = since_review(release, tree, row["module"], row["symbol"], row["recorded"])
    except ConfigError as error:
        return [], str(error)
    return list(lines), note
