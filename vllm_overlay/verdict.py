"""Whether fixes fit a vLLM: apply, upstreamed, conflict or incompatible, each with its reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_overlay.edits import Edit, look_at_edit
from vllm_overlay.errors import ConfigError, did_you_mean
from vllm_overlay.fix import Fix
from vllm_overlay.symbols import MODULE, overlap
from vllm_overlay.upstream import Tree

GOOD = ("apply", "upstreamed")
SHORT = 12  # digits of a digest in a message


@dataclass(frozen=True)
class Target:
    """A module that a fix changes: ``kind`` is module, edit or hook; ``symbols`` those changed."""

    kind: str
    module: str
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compared:
    """A recorded digest of a symbol beside the one found; None if there is no such symbol."""

    module: str
    symbol: str
    recorded: str
    found: str | None

    @property
    def equal(self) -> bool:
        return self.recorded == self.found


@dataclass(frozen=True)
class Judged:
    """The verdict on one fix. ``patched`` is each edited module's text with this fix in it.

    ``evidence`` is JSON-ready: what was compared and where each hunk stands.
    """

    fix: Fix
    verdict: str
    reasons: tuple[str, ...]
    targets: tuple[Target, ...]
    patched: dict[str, bytes] = field(default_factory=dict, repr=False)
    evidence: dict[str, Any] = field(default_factory=dict, repr=False)


def order(fixes: Sequence[Fix]) -> list[Fix]:
    """Return the fixes so that each stands behind those it names in ``after``, else as given.

    Raises ConfigError for a circle.
    """
    left, done = {fix.name: fix for fix in fixes}, []
    while left:
        free = next((f for f in left.values() if not any(a in left for a in f.after)), None)
        if free is None:
            circle = " -> ".join(_circle(left))
            raise ConfigError("fixes wait for each other", found=f"after: {circle}")
        done.append(left.pop(free.name))
    return done


def _circle(fixes: Mapping[str, Fix]) -> list[str]:
    way = [next(iter(fixes))]
    while way[-1] not in way[:-1]:
        way.append(next(name for name in fixes[way[-1]].after if name in fixes))
    return way[way.index(way[-1]) :]


def judge(fixes: Sequence[Fix], tree: Tree) -> list[Judged]:
    """Return the verdict on each fix, given in the order in which they are applied together."""
    judged: dict[str, Judged] = {}
    for fix in fixes:
        before = [judged[name] for name in _ancestors(fix, fixes)]
        judged[fix.name] = _judge_one(fix, tree, before)
    return _with_conflicts(judged, fixes)


def review_entry(fix: Fix, tree: Tree, before: Sequence[Judged] = ()) -> dict[str, dict[str, str]]:
    """Return what ``reviewed`` must hold for this tree: the symbols that the edits change, and
    those that the manifest names for the newest release that was reviewed.

    Raises ConfigError if an edit does not apply or a symbol does not exist.
    """
    newest = fix.reviewed[max(fix.reviewed, key=Version)] if fix.reviewed else {}
    names = {module: set(symbols) for module, symbols in newest.items()}
    for edit in _edits(fix, tree, before):
        if edit.patched is None:
            why = edit.errors[0] if edit.errors else f"{edit.name} is upstream, wholly or in part"
            raise ConfigError(why, file=fix.file)
        names.setdefault(edit.module, set()).update(edit.changed)
    listed = {module: dict.fromkeys(sorted(names[module]), "") for module in sorted(names)}
    entry: dict[str, dict[str, str]] = {}
    for row in _compare(listed, tree):
        if row.found is not None:
            entry.setdefault(row.module, {})[row.symbol] = row.found
        elif row.symbol in newest.get(row.module, {}):
            what = f"{row.module}: {row.symbol} does not exist in vLLM {tree.version}"
            raise ConfigError(what, file=fix.file, remedy="change the fix or its reviewed symbols")
    return entry


# --- one fix ---


def _ancestors(fix: Fix, fixes: Sequence[Fix]) -> list[str]:
    """Return the names of the fixes that this one is applied after, in the order of ``fixes``."""
    known = {other.name: other for other in fixes}
    found: set[str] = set()
    todo = [name for name in fix.after if name in known]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [other for other in known[name].after if other in known]
    return [name for name in known if name in found]


def _judge_one(fix: Fix, tree: Tree, before: Sequence[Judged]) -> Judged:
    """Judge one fix on the text that the fixes ``before`` it left."""
    edits = _edits(fix, tree, before)
    symbols = _compare(_entry(fix.reviewed, tree.release) or {}, tree, edits)
    carrying = _compare(_entry(fix.upstreamed, tree.release) or {}, tree)
    evidence = {
        "release": tree.release,
        "symbols": [dataclasses.asdict(row) for row in symbols],
        "upstreamed": [dataclasses.asdict(row) for row in carrying],
        "edits": [edit.evidence() for edit in edits],
    }
    targets = _targets(fix, tree, edits)
    proof = _proof_of_upstream(fix, tree, edits, carrying)
    if proof:
        return Judged(fix, "upstreamed", (proof,), targets, {}, evidence)
    reasons = [
        *_waiting(fix, before),
        *_out_of_range(fix, tree),
        *_modules(fix, tree, before),
        *_hooks(fix, tree, before),
        *_partly_upstream(fix, tree, edits),
        *(error for edit in edits for error in edit.errors),
        *_unreviewed(fix, tree, edits, symbols),
    ]
    if reasons:
        return Judged(fix, "incompatible", tuple(reasons), targets, {}, evidence)
    patched = {edit.module: edit.patched for edit in edits if edit.patched is not None}
    return Judged(fix, "apply", (), targets, patched, evidence)


def _edits(fix: Fix, tree: Tree, before: Sequence[Judged]) -> list[Edit]:
    rows = _compare(_entry(fix.reviewed, tree.release) or {}, tree)
    reviewed = bool(rows) and all(row.equal for row in rows if row.found)
    edits = []
    for module, file in fix.edits.items():
        texts = [item.patched[module] for item in before if module in item.patched]
        name = f"{fix.folder.name}/{file.relative_to(fix.folder)}"
        text = texts[-1] if texts else None
        edits.append(look_at_edit(tree, module, file, name, text, reviewed=reviewed))
    return edits


def _targets(fix: Fix, tree: Tree, edits: Sequence[Edit]) -> tuple[Target, ...]:
    reviewed = _entry(fix.reviewed, tree.release) or {}
    found = [Target("module", module) for module in fix.modules]
    for edit in edits:
        changed = edit.changed or tuple(reviewed.get(edit.module, ()))
        found.append(Target("edit", edit.module, changed))
    found += [Target("hook", module, tuple(reviewed.get(module, ()))) for module in fix.hooks]
    return tuple(found)


def _waiting(fix: Fix, before: Sequence[Judged]) -> Iterator[str]:
    """A fix stacked on one that does not apply would be judged on the wrong text."""
    for item in before:
        shared = {t.module for t in item.targets} & {*fix.edits, *fix.hooks}
        if item.verdict not in GOOD and shared:
            yield f"{min(shared)}: it comes after {item.fix.name}, which is {item.verdict}"


def _out_of_range(fix: Fix, tree: Tree) -> Iterator[str]:
    if not SpecifierSet(fix.vllm).contains(tree.release, prereleases=True):
        yield f"vLLM {tree.version} is outside of the fix's range {fix.vllm}"


def _modules(fix: Fix, tree: Tree, before: Sequence[Judged]) -> Iterator[str]:
    placed = _placed(fix, before)
    packages = {name for name, file in placed.items() if file == "__init__.py"}
    for module in fix.modules:
        parent = module.rpartition(".")[0]
        if tree.path(module) is not None or tree.has_package(module):
            yield f"{module}: vLLM {tree.version} has a module of this name"
        if not tree.has_package(parent) and parent not in packages:
            yield f"{module}: its package {parent} does not exist in vLLM {tree.version}"


def _hooks(fix: Fix, tree: Tree, before: Sequence[Judged]) -> Iterator[str]:
    placed = _placed(fix, before)
    for module in fix.hooks:
        if tree.path(module) is None and module not in placed:
            hint = did_you_mean(module, tree.siblings(module))
            yield f"{module}: no such module in vLLM {tree.version}" + (f"; {hint}" if hint else "")
        elif stale := tree.stale_bytecode(module):
            yield f"{module}: Python would run compiled code of another source; remove {stale}"


def _placed(fix: Fix, before: Sequence[Judged]) -> dict[str, str]:
    """Return the new modules of the fix and those before it, each with its file's name."""
    fixes = [*(item.fix for item in before if item.verdict == "apply"), fix]
    return {module: file.name for each in fixes for module, file in each.modules.items()}


# --- reviewed symbols ---


def _entry(digests: Mapping[str, Any], release: str) -> Mapping[str, Mapping[str, str]] | None:
    for key, entry in digests.items():
        if Version(key) == Version(release):
            return dict(entry)
    return None


def _compare(
    entry: Mapping[str, Mapping[str, str]], tree: Tree, edits: Sequence[Edit] = ()
) -> list[Compared]:
    """Compare recorded digests with those of the original tree, whatever other fixes change.

    A symbol that only a fix before this one adds is compared with the text which that one left.
    """
    rows = []
    added = {edit.module: edit.before.whole for edit in edits}
    for module, symbols in entry.items():
        known = {**added.get(module, {}), **tree.symbols(module)}
        for symbol, digest in symbols.items():
            rows.append(Compared(module, symbol, digest, known.get(symbol)))
    return rows


def _unreviewed(
    fix: Fix, tree: Tree, edits: Sequence[Edit], rows: Sequence[Compared]
) -> Iterator[str]:
    if not (fix.edits or fix.hooks or fix.reviewed):
        return  # new modules alone change nothing that could be reviewed
    entry = _entry(fix.reviewed, tree.release)
    if entry is None:
        known = ", ".join(fix.reviewed) or "no release"
        yield (
            f"not reviewed for vLLM {tree.release} (reviewed: {known}); "
            f"run vllm-overlay review {fix.name}"
        )
        return
    yield from (_difference(row, tree) for row in rows if not row.equal)
    for edit in edits:
        reviewed = set(entry.get(edit.module, ()))
        if edit.changed and not reviewed:
            yield f"{edit.module}: no symbol of it was reviewed for vLLM {tree.release}"
            continue
        for symbol in edit.changed:
            found = tree.symbols(edit.module).get(symbol)
            if found and symbol != MODULE and not any(_covers(name, symbol) for name in reviewed):
                yield (
                    f"{edit.module}: {symbol} is changed but was not reviewed for vLLM "
                    f"{tree.release}; its digest is {found}"
                )
    for module in fix.hooks:
        if not entry.get(module) and tree.path(module) is not None:
            yield f"{module}: no symbol of it was reviewed for vLLM {tree.release}"


def _covers(reviewed: str, symbol: str) -> bool:
    return reviewed in (MODULE, symbol) or symbol.startswith(f"{reviewed}.")


def _difference(row: Compared, tree: Tree) -> str:
    reviewed = row.recorded[:SHORT]
    if row.found is None:
        hint = did_you_mean(row.symbol, tree.symbols(row.module))
        where = "" if tree.path(row.module) else ", and neither does its module"
        return (
            f"{row.module}: {row.symbol} does not exist in vLLM {tree.version}{where}; "
            f"reviewed {reviewed}" + (f"; {hint}" if hint else "")
        )
    return (
        f"{row.module}: {row.symbol} is not what was reviewed for vLLM {tree.release}: "
        f"reviewed {reviewed}, found {row.found[:SHORT]}"
    )


# --- upstreamed ---


def _proof_of_upstream(
    fix: Fix, tree: Tree, edits: Sequence[Edit], recorded: Sequence[Compared]
) -> str | None:
    """Return how it is known that this vLLM carries the whole fix, or None.

    ``recorded``: the symbols that the fix lists as ``upstreamed`` for this release.
    """
    if recorded and all(row.equal for row in recorded):
        return f"vLLM {tree.version} carries it: the symbols are those recorded as upstreamed"
    if fix.hooks or not all(_same_module(fix, module, tree) for module in fix.modules):
        return None
    if not all(edit.carried for edit in edits):
        return None
    count = sum(len(edit.hunks) for edit in edits)
    parts = [f"every hunk applies in reverse ({count})"] if edits else []
    parts += ["its modules are the same"] if fix.modules else []
    return f"vLLM {tree.version} carries it: {', '.join(parts)}"


def _same_module(fix: Fix, module: str, tree: Tree) -> bool:
    found = tree.symbols(module).get(MODULE)
    ours = tree.read(fix.modules[module].read_bytes(), module).whole[MODULE]
    return found == ours


def _partly_upstream(fix: Fix, tree: Tree, edits: Sequence[Edit]) -> Iterator[str]:
    there: list[str] = []
    missing = [f"the hook on {module}" for module in fix.hooks]
    for edit in edits:
        carried = {hunk.number for hunk in edit.carried_hunks}
        for hunk in edit.hunks:
            part = there if hunk.number in carried else missing
            part.append(f"hunk {hunk.number} of {edit.name}")
    for module in fix.modules:
        (there if _same_module(fix, module, tree) else missing).append(module)
    if there:
        yield (
            f"partly upstream: vLLM {tree.version} has {', '.join(there)}, "
            f"but not {', '.join(missing)}"
        )


# --- conflicts ---


def _with_conflicts(judged: Mapping[str, Judged], fixes: Sequence[Fix]) -> list[Judged]:
    """Turn what applies into a conflict where two fixes change the same and none is after."""
    clashes: dict[str, list[str]] = {name: [] for name in judged}
    applying = [item for item in judged.values() if item.verdict == "apply"]
    for one, other in combinations(applying, 2):
        if one.fix.name not in _ancestors(other.fix, fixes):
            for what in _shared(one, other):
                for a, b in ((one, other), (other, one)):
                    clashes[a.fix.name].append(
                        f"{what} is changed by {b.fix.name} too, and neither declares after"
                    )
    result = []
    for item in judged.values():
        if found := tuple(clashes[item.fix.name]):
            item = replace(item, verdict="conflict", reasons=found, patched={})
        result.append(item)
    return result


def _shared(one: Judged, other: Judged) -> Iterator[str]:
    """Yield what both change: a module placed or edited twice, or the same symbol."""
    for mine in one.targets:
        for theirs in other.targets:
            if mine.module != theirs.module:
                continue
            if mine.kind == theirs.kind != "hook":
                yield mine.module
            for symbol in mine.symbols:
                if any(overlap(symbol, name) for name in theirs.symbols):
                    yield f"{mine.module}: {symbol}"
