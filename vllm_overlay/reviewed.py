"""What a person must look at before a fix's digests are recorded for a vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_overlay.errors import ConfigError, UsageError, did_you_mean
from vllm_overlay.fix import Fix, load_fix
from vllm_overlay.recipe_format import is_name
from vllm_overlay.releases import find_tree
from vllm_overlay.sources import since_review
from vllm_overlay.symbols import MODULE
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import Judged, judge, order, review_entry


@dataclass(frozen=True)
class Row:
    """A symbol's digest beside the recorded one, None if it is listed for the first time.

    ``lines`` is the diff of its source since then; ``note`` says why there is none.
    """

    module: str
    symbol: str
    recorded: str | None
    found: str
    lines: tuple[str, ...] = ()
    note: str | None = None

    @property
    def same(self) -> bool:
        return self.recorded == self.found


@dataclass(frozen=True)
class Review:
    """What recording digests of this vLLM would mean. ``base`` is the release whose digests they
    are compared with: this one if it is recorded, else the newest. ``upstreamed``: why there is
    nothing to review."""

    fix: Fix
    version: str
    release: str
    base: str | None = None
    rows: tuple[Row, ...] = ()
    upstreamed: str | None = None

    @property
    def entry(self) -> dict[str, dict[str, str]]:
        entry: dict[str, dict[str, str]] = {}
        for row in self.rows:
            entry.setdefault(row.module, {})[row.symbol] = row.found
        return entry

    @property
    def recorded(self) -> bool:
        """Whether the manifest has these very digests for this release already."""
        known = _own_key(self.fix, self.release)
        return known is not None and all(row.same for row in self.rows)

    @property
    def in_range(self) -> bool:
        return SpecifierSet(self.fix.vllm).contains(self.release, prereleases=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the review as JSON-ready data."""
        return {
            "fix": self.fix.name,
            "vllm": self.version,
            "compared_with": self.base,
            "in_range": self.in_range,
            "upstreamed": self.upstreamed,
            "symbols": [
                {
                    "module": row.module,
                    "symbol": row.symbol,
                    "recorded": row.recorded,
                    "found": row.found,
                    "diff": list(row.lines),
                    "note": row.note,
                }
                for row in self.rows
            ],
        }


def load_with_ancestors(name: str, folder: Path) -> list[Fix]:
    """Return a fix behind those that it is applied after. Raises ConfigError if one is missing."""
    known: dict[str, Fix] = {}
    todo = [name]
    while todo:
        each = todo.pop()
        if each not in known:
            known[each] = load_fix(_folder_of(each, folder))
            todo += known[each].after
    # The fix itself goes last: the others have no need of it.
    others = [fix for fix in known.values() if fix.name != name]
    return order([*others, known[name]])


def _folder_of(name: str, folder: Path) -> Path:
    if is_name(name) and "/" not in name and (folder / name).is_dir():
        return folder / name
    known = [child.name for child in folder.iterdir()] if folder.is_dir() else []
    what = f"there is no fix '{name}'"
    raise UsageError(what, file=folder, remedy=did_you_mean(name[:200], known))


def look(fixes: Sequence[Fix], tree: Tree, home: Path) -> Review:
    """Return what there is to review of the last of ``fixes``; the others are its ancestors.

    ``home`` is the state folder, where the release that was reviewed is looked for; it is fetched
    if it is not there. Raises ConfigError(s) if the fix does not fit or names no symbol.
    """
    fix = fixes[-1]
    *before, judged = judge(fixes, tree)
    if judged.verdict == "upstreamed":
        return Review(fix, tree.version, tree.release, upstreamed=judged.reasons[0])
    base = _own_key(fix, tree.release) or max(fix.reviewed, key=Version, default=None)
    recorded = fix.reviewed[base] if base else {}
    view = replace(fix, reviewed={base: recorded} if base else {})
    entry = review_entry(view, tree, before)
    _add_surroundings(entry, judged, tree)
    if not entry:
        raise ConfigError(
            "the fix names no symbol to review", file=fix.file,
            remedy="list what its hooks rely on under 'reviewed', with the digest \"00000000\"",
        )  # fmt: skip
    rows = [
        Row(module, symbol, _seen(recorded.get(module, {}).get(symbol)), digest)
        for module, symbols in sorted(entry.items())
        for symbol, digest in symbols.items()
    ]
    return Review(fix, tree.version, tree.release, base, _explained(rows, base, tree, home))


def _seen(digest: str | None) -> str | None:
    """Return a recorded digest, None for the zeros that stand for one that is yet to be found."""
    return digest if digest and digest.strip("0") else None


def _add_surroundings(entry: dict[str, dict[str, str]], judged: Judged, tree: Tree) -> None:
    """Add what new symbols stand in, for a module whose edit changes no symbol that was there."""
    for target in judged.targets:
        if target.kind != "edit" or entry.get(target.module):
            continue
        known = tree.symbols(target.module)
        around = {_around(symbol, known) for symbol in target.symbols} & known.keys()
        entry[target.module] = {name: known[name] for name in sorted(around)}


def _around(symbol: str, known: Mapping[str, str]) -> str:
    while symbol not in known and "." in symbol:
        symbol = symbol.rpartition(".")[0]
    return symbol if symbol in known else MODULE


def _own_key(fix: Fix, release: str) -> str | None:
    return next((key for key in fix.reviewed if Version(key) == Version(release)), None)


def _explained(rows: Sequence[Row], base: str | None, tree: Tree, home: Path) -> tuple[Row, ...]:
    """Add the difference of the sources to each row whose digest has changed."""
    if base is None or all(row.same or row.recorded is None for row in rows):
        return tuple(rows)
    try:
        old = find_tree(base, home)
    except ConfigError as error:
        note = f"no source to compare with; fetch vLLM {base} (check --vllm {base}): {error}"
        return tuple(
            row if row.same or row.recorded is None else replace(row, note=note) for row in rows
        )
    return tuple(_with_diff(row, old, tree) for row in rows)


def _with_diff(row: Row, old: Tree, tree: Tree) -> Row:
    if row.same or row.recorded is None:
        return row
    lines, note = since_review(old, tree, row.module, row.symbol, row.recorded)
    return replace(row, lines=lines, note=note)
