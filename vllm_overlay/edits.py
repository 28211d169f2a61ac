"""One edit of a fix, looked at on one vLLM: where its hunks stand and what they change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_overlay import diffs
from vllm_overlay.diffs import DiffError, FileDiff, Placed
from vllm_overlay.errors import ConfigError, did_you_mean
from vllm_overlay.symbols import MODULE, Symbols
from vllm_overlay.upstream import Tree

NOTHING = Symbols({}, {})


@dataclass(frozen=True)
class HunkLook:
    """Where one hunk by itself stands in the file, as lines from 1: to be applied, or applied."""

    number: int
    line: int  # in the diff
    forward: int | None
    reverse: int | None


@dataclass(frozen=True)
class Edit:
    """``name`` is what messages call the diff. ``fits``: it applies as a whole; ``carried``: the
    file has the whole of it already. ``changed`` are the symbols it changes, adds or removes, and
    ``before`` the digests of the text that it was looked at on."""

    module: str
    name: str
    errors: tuple[str, ...] = ()
    hunks: tuple[HunkLook, ...] = ()
    fits: bool = False
    carried: bool = False
    patched: bytes | None = None
    changed: tuple[str, ...] = ()
    before: Symbols = NOTHING
    diff: FileDiff | None = None

    @property
    def carried_hunks(self) -> tuple[HunkLook, ...]:
        """The hunks that the file has already."""
        if self.fits:
            return ()
        return tuple(h for h in self.hunks if h.reverse and (self.carried or not h.forward))

    def evidence(self) -> dict[str, Any]:
        """Return what was found, JSON-ready."""
        hunks = [vars(hunk) for hunk in self.hunks]
        texts = {hunk.number: hunk for hunk in self.diff.hunks} if self.diff else {}
        carried = [
            {"number": h.number, "file_line": h.reverse, "text": texts[h.number].text()}
            for h in self.carried_hunks
        ]
        return {
            "module": self.module,
            "diff": self.name,
            "applies": self.fits,
            "applies_in_reverse": self.carried,
            "changed": list(self.changed),
            "hunks": hunks,
            "carried": carried,
        }


def look_at_edit(
    tree: Tree, module: str, file: Path, name: str, text: bytes | None, *, reviewed: bool
) -> Edit:
    """Return what the diff in ``file`` does to ``module``: to ``text``, or to the tree's own.

    ``reviewed``: the tree's symbols are known to be as they were before the fix.
    """
    edit = Edit(module, name)
    path = tree.path(module)
    if path is None:
        hint = did_you_mean(module, tree.siblings(module))
        what = f"{module}: no such module in vLLM {tree.version}" + (f"; {hint}" if hint else "")
        return replace(edit, errors=(what,))
    before = path.read_bytes() if text is None else text
    try:
        diff = _only_file(diffs.parse(file.read_bytes(), name), str(path.relative_to(tree.root)))
        edit = replace(edit, before=tree.read(before, module))
    except ConfigError as error:
        return replace(edit, errors=(str(error),))
    return _placed(edit, diff, before, tree, reviewed)


def _only_file(parts: Sequence[FileDiff], path: str) -> FileDiff:
    """Return the one part of a diff, which must change the file ``path`` and nothing else."""
    diff = parts[0]
    if len(parts) > 1:
        raise DiffError(
            "the diff changes several files", file=diff.name,
            found=", ".join(part.path for part in parts[:5]), expected=path,
            remedy="give each module its own diff",
        )  # fmt: skip
    if diff.old_path != path or diff.new_path != path:
        raise DiffError(
            "the diff is for another file", file=diff.name,
            found=f"{diff.old_path or '/dev/null'} -> {diff.new_path or '/dev/null'}",
            expected=path,
        )  # fmt: skip
    return diff


def _placed(edit: Edit, diff: FileDiff, text: bytes, tree: Tree, reviewed: bool) -> Edit:
    """Add where the diff and each of its hunks stand; a whole diff that fits is applied."""
    forward, why = _lines(text, diff, edit.module)
    undo = diff.reversed()
    reverse, _ = _lines(text, undo, edit.module)
    if forward and reverse:  # as in a run of equal lines: a second time, or out again?
        carried = False if reviewed else _is_carried(edit, diff, text, tree, forward, reverse)
        if carried is None:
            what = f"{edit.name}: it applies to {edit.module} both forward and in reverse"
            return replace(edit, errors=(what,))
        forward, reverse = ([], reverse) if carried else (forward, [])
    edit = replace(edit, fits=bool(forward), carried=bool(reverse))
    hunks = tuple(
        HunkLook(
            hunk.number, hunk.line,
            forward[index] if forward else _line_alone(text, diff, index, edit.module),
            reverse[index] if reverse else _line_alone(text, undo, index, edit.module),
        )
        for index, hunk in enumerate(diff.hunks)
    )  # fmt: skip
    edit = replace(edit, hunks=hunks, diff=diff)
    if edit.fits:
        return _applied(edit, diff, text, tree)
    torn = edit.carried_hunks and all(h.forward or h.reverse for h in hunks)
    return edit if torn else replace(edit, errors=(str(why),))


def _is_carried(
    edit: Edit, diff: FileDiff, text: bytes, tree: Tree, forward: list[int], reverse: list[int]
) -> bool | None:
    """Return whether a text that a diff applies to both ways has it already; None if unknown.

    What tells: one way, every hunk stands at the very line that it states; or one way, symbols
    come or go, while the other only repeats what is there.
    """
    as_written = forward == [hunk.old_start for hunk in diff.hunks]
    as_carried = reverse == [hunk.new_start for hunk in diff.hunks]
    if as_written == as_carried:
        try:
            new, old = (
                tree.read(diffs.apply(text, way, edit.module), edit.module).own.keys()
                for way in (diff, diff.reversed())
            )
        except ConfigError:
            return None
        as_written, as_carried = (edit.before.own.keys() != names for names in (new, old))
    return None if as_written == as_carried else as_carried


def _lines(text: bytes, diff: FileDiff, module: str) -> tuple[list[int], DiffError | None]:
    try:
        return [placed.line for placed in diffs.place(text, diff, module)], None
    except DiffError as error:
        return [], error


def _line_alone(text: bytes, diff: FileDiff, index: int, module: str) -> int | None:
    lines, _ = _lines(text, replace(diff, hunks=diff.hunks[index : index + 1]), module)
    return lines[0] if lines else None


def _applied(edit: Edit, diff: FileDiff, text: bytes, tree: Tree) -> Edit:
    places = diffs.place(text, diff, edit.module)
    patched = diffs.splice(text, diff, places)
    try:
        changed = _changed(edit, patched, tree)
        for other in _other_ways(places):
            if _changed(edit, diffs.splice(text, diff, other), tree) == changed:
                raise _ambiguous(edit, places, other)
    except ConfigError as error:
        return replace(edit, errors=(str(error),))
    return replace(edit, patched=patched, changed=changed)


def _changed(edit: Edit, patched: bytes, tree: Tree) -> tuple[str, ...]:
    """Return the symbols that differ; the module itself only if no other one does."""
    after = tree.read(patched, f"{edit.module} with {edit.name}")
    own = {**edit.before.own, **after.own}
    changed = sorted(n for n in own if edit.before.own.get(n) != after.own.get(n))
    return tuple(name for name in changed if name != MODULE) or tuple(changed)


def _other_ways(places: Sequence[Placed]) -> Iterator[list[Placed]]:
    """Yield the places with one hunk where it fits as well, but further from its stated line."""
    for index, placed in enumerate(places):
        start = places[index - 1].end if index else 0
        for other in placed.others:
            if other.start >= start and all(other.end <= p.start for p in places[index + 1 :][:1]):
                yield [*places[:index], other, *places[index + 1 :]]


def _ambiguous(edit: Edit, places: Sequence[Placed], other: Sequence[Placed]) -> DiffError:
    """Nothing tells these two places apart: in different symbols, the review would."""
    one, two = next(pair for pair in zip(places, other, strict=True) if pair[0] != pair[1])
    return DiffError(
        f"hunk {one.hunk.number} fits two places of the same symbol of {edit.module}",
        file=edit.name, line=one.hunk.line, found=f"lines {one.line}, {two.line}", expected="one",
        remedy="give the hunk more context lines",
    )  # fmt: skip
