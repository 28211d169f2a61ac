"""Unified diffs: read by unidiff, applied by our own strict rules.

A hunk stands where its context and removed lines stand in the file, byte for byte: no fuzz.
Shifted lines are fine. Where a hunk fits in more than one place, the order of the hunks decides;
then the shift of the hunks next to it that have one place only; then the line that it states, as
for `git apply`: the nearest place. Two places equally near are refused. Nearness alone is no proof:
a place that rests on it keeps the ``others``, and who applies it must rule them out (``edits``).
As for git, a hunk whose context is cut short stands at that end of the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from unidiff import Hunk as ReadHunk
from unidiff import PatchedFile, PatchSet
from unidiff.errors import UnidiffParseError

from vllm_overlay.errors import ConfigError

MAX_BYTES = 16 << 20  # of one diff
MAX_LINES = 100_000  # of one diff; unidiff takes up to a kilobyte for each
MAX_HUNKS = 5000  # of one file
MAX_HEADER = 1024  # bytes of a `diff --git` or `Binary files` line
MAX_PLACES = 200  # where one hunk may fit; more than that is no context
MAX_ALL_PLACES = 100_000  # where all hunks of a file may fit
DEV_NULL = "/dev/null"


class DiffError(ConfigError):
    """A diff that cannot be read or does not fit its file exactly."""


@dataclass(frozen=True)
class Hunk:
    """``line`` is where it stands in the diff; ``old`` and ``new`` hold lines with their ends.

    ``old_start`` and ``new_start`` are the stated lines, from 1. ``leading`` and ``trailing``
    count context lines.
    """

    number: int
    line: int
    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    leading: int
    trailing: int

    def reversed(self) -> Hunk:
        return replace(self, old_start=self.new_start, new_start=self.old_start,
                       old=self.new, new=self.old)  # fmt: skip

    def text(self) -> list[str]:
        """Return its lines for a reader, each with its mark and without its end."""
        old, new = ([line.decode(errors="replace") for line in x] for x in (self.old, self.new))
        lines = difflib.unified_diff(old, new, n=len(old) + len(new))
        return [line.rstrip("\r\n") for line in list(lines)[3:]]


@dataclass(frozen=True)
class FileDiff:
    """What one diff does to one file. ``old_path`` or ``new_path`` is None for /dev/null.

    ``crlf``: the whole diff came with Windows line ends, so its lines take those of the file.
    """

    name: str
    old_path: str | None
    new_path: str | None
    hunks: tuple[Hunk, ...]
    crlf: bool = False
    binary: bool = False

    @property
    def path(self) -> str:
        return self.new_path or self.old_path or ""

    @property
    def renamed(self) -> bool:
        return None not in (self.old_path, self.new_path) and self.old_path != self.new_path

    def reversed(self) -> FileDiff:
        hunks = tuple(hunk.reversed() for hunk in self.hunks)
        return replace(self, old_path=self.new_path, new_path=self.old_path, hunks=hunks)


# --- reading ---


def parse(text: bytes, name: str) -> tuple[FileDiff, ...]:
    """Return every file's part of a unified diff, plain or in git's form.

    ``name`` is what errors call the diff. Raises DiffError for anything but a whole, sound diff.
    """
    if len(text) > MAX_BYTES or text.count(b"\n") > MAX_LINES:
        most = f"at most {MAX_BYTES >> 20} MiB and {MAX_LINES} lines"
        raise DiffError("the diff is too large", file=name, expected=most)
    lines = split_lines(text)
    crlf = bool(lines) and all(line.endswith(b"\r\n") for line in lines)
    if crlf:
        lines = [line[:-2] + b"\n" for line in lines]
    _check_headers(lines, name)
    try:
        # latin-1 gives every byte back unchanged
        read = PatchSet(line.decode("latin-1") for line in lines)
    except (UnidiffParseError, ValueError) as error:
        raise DiffError(f"no sound unified diff: {error}", file=name) from None
    if not read:
        raise DiffError("no unified diff found", file=name, expected="--- and +++ lines")
    found = tuple(_file(part, lines, name, crlf) for part in read)
    _check_nothing_is_lost(read, lines, name)
    return found


def split_lines(text: bytes) -> list[bytes]:
    """Return the lines with their ends; only a line feed ends a line."""
    lines = text.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _check_headers(lines: Sequence[bytes], name: str) -> None:
    """Refuse header lines so long that unidiff's patterns would take minutes on them."""
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_HEADER and line.startswith((b"diff --git ", b"Binary file")):
            raise DiffError("a header is too long", file=name, line=number)


def _file(part: PatchedFile, lines: Sequence[bytes], name: str, crlf: bool) -> FileDiff:
    if len(part) > MAX_HUNKS:
        raise DiffError("the diff has too many hunks", file=name, expected=f"at most {MAX_HUNKS}")
    hunks = tuple(_hunk(hunk, number, lines, name) for number, hunk in enumerate(part, 1))
    old, new = _path(part.source_file, "a/"), _path(part.target_file, "b/")
    if old is None and new is None:
        raise DiffError("the diff names no file", file=name, line=part.diff_line_no)
    return FileDiff(name, old, new, hunks, crlf, part.is_binary_file)


def _path(read: str, prefix: str) -> str | None:
    if read == DEV_NULL:
        return None
    path = read.strip('"').encode("latin-1").decode("utf-8", "replace")
    return path.removeprefix(prefix)


def _hunk(read: ReadHunk, number: int, lines: Sequence[bytes], name: str) -> Hunk:
    kinds: list[str] = []
    texts: list[bytes] = []
    for line in read:
        if line.line_type == "\\":
            if not texts:
                raise DiffError("'No newline' follows no line", file=name, line=line.diff_line_no)
            texts[-1] = texts[-1].removesuffix(b"\n")
        elif line.line_type:  # unidiff keeps empty lines after a hunk with no type
            kinds.append(line.line_type)
            texts.append(line.value.encode("latin-1"))
    pairs = list(zip(kinds, texts, strict=True))
    old = tuple(text for kind, text in pairs if kind != "+")
    new = tuple(text for kind, text in pairs if kind != "-")
    at = read[0].diff_line_no - 1 if read and read[0].diff_line_no else None
    if at is None or old == new:
        raise DiffError(f"hunk {number} changes nothing", file=name, line=at)
    for side in (old, new):
        if any(not text.endswith(b"\n") for text in side[:-1]):
            raise DiffError(f"hunk {number} goes on after the end of the file", file=name, line=at)
    context = [kind == " " for kind in kinds]
    leading, trailing = context.index(False), context[::-1].index(False)
    return Hunk(number, at, read.source_start, read.target_start, old, new, leading, trailing)


def _check_nothing_is_lost(read: PatchSet, lines: Sequence[bytes], name: str) -> None:
    """Refuse hunk lines that unidiff passed over: a header that is wrong or states too few."""
    taken: set[int] = set()
    for hunk in (hunk for part in read for hunk in part):
        body = [line.diff_line_no for line in hunk if line.diff_line_no]
        taken.update((body[0] - 1, *body))
        following = lines[body[-1]] if body[-1] < len(lines) else b""
        starts_file = following.startswith(b"--- ") or following.rstrip() == b"--"
        if following.startswith((b"+", b"-", b" ")) and not starts_file:
            raise DiffError("a hunk is longer than its header says", file=name, line=body[-1] + 1)
    for number, line in enumerate(lines, 1):
        if line.startswith(b"@@") and number not in taken:
            raise DiffError("a hunk header that is not understood", file=name, line=number)


# --- applying ---


@dataclass(frozen=True)
class Placed:
    """Where a hunk stands: bytes ``start`` to ``end`` of the source, ``line`` from 1.

    ``others`` are the places that are merely further away from the line that the hunk states.
    """

    hunk: Hunk
    line: int
    start: int
    end: int
    others: tuple[Placed, ...] = ()

    @property
    def shift(self) -> int:
        """Lines below the line that the hunk states."""
        return self.line - self.hunk.old_start


def apply(source: bytes, diff: FileDiff, name: str) -> bytes:
    """Return ``source`` with every hunk of ``diff`` applied.

    ``name`` is what errors call the source. Raises DiffError unless each hunk has one place.
    """
    return splice(source, diff, place(source, diff, name))


def splice(source: bytes, diff: FileDiff, places: Sequence[Placed]) -> bytes:
    """Return ``source`` with the hunks applied at these places, which are in order."""
    parts, at = [], 0
    for placed in places:
        parts += [source[at : placed.start], *_lines(placed.hunk.new, source, diff)]
        at = placed.end
    return b"".join([*parts, source[at:]])


def reverse_applies(source: bytes, diff: FileDiff) -> bool:
    """Return whether every hunk can be taken out of ``source``: it is already there."""
    try:
        place(source, diff.reversed(), diff.name)
    except DiffError:
        return False
    return True


def place(source: bytes, diff: FileDiff, name: str) -> list[Placed]:
    """Return the one place of every hunk in ``source``, in order. Raises DiffError."""
    if diff.binary or not diff.hunks:
        raise DiffError(f"the diff has no hunk for {diff.path}", file=diff.name)
    rows: list[list[Placed]] = []
    count = 0
    for hunk in diff.hunks:
        row = _candidates(hunk, source, diff)
        rows.append(row)
        count += len(row)
        if not row:
            raise DiffError(
                f"hunk {hunk.number} does not match {name}", file=diff.name, line=hunk.line,
                found="its lines nowhere", expected=f"them near line {hunk.old_start}",
            )  # fmt: skip
        if len(row) > MAX_PLACES or count > MAX_ALL_PLACES:
            raise _ambiguous(hunk, row, diff, name)
    rows = _in_order(rows, diff, name)
    before, after = _last_shifts(rows), _last_shifts(rows[::-1])[::-1]
    return [
        _choose(row, {one, other} - {None}, diff, name)
        for row, one, other in zip(rows, before, after, strict=True)
    ]


def _last_shifts(rows: Sequence[list[Placed]]) -> list[int | None]:
    """Return for each hunk the shift of the last one so far that has one place only."""
    shifts: list[int | None] = []
    for row in rows:
        shifts.append(row[0].shift if len(row) == 1 else shifts[-1] if shifts else None)
    return shifts


def _candidates(hunk: Hunk, source: bytes, diff: FileDiff) -> list[Placed]:
    """Return every place where the hunk's old lines stand, up to one over ``MAX_PLACES``."""
    block = b"".join(_lines(hunk.old, source, diff))
    if not block:  # an insertion without context: only an empty file has one place for it
        return [] if source else [Placed(hunk, 1, 0, 0)]
    # Context cut short by an end of the file says that the hunk stands there, as git has it.
    at_end = not block.endswith(b"\n") or not hunk.trailing
    at_start = hunk.old_start <= 1 and hunk.leading < max(hunk.trailing, 1)
    found: list[Placed] = []
    at, counted, line = source.find(block), 0, 1
    while at >= 0 and len(found) <= MAX_PLACES:
        end = at + len(block)
        ends_well = end == len(source) if at_end else True
        begins_well = not at or (source[at - 1 : at] == b"\n" and not at_start)
        if begins_well and ends_well:
            line, counted = line + source.count(b"\n", counted, at), at
            found.append(Placed(hunk, line, at, end))
        at = source.find(block, at + 1)
    return found


def _lines(lines: Sequence[bytes], source: bytes, diff: FileDiff) -> list[bytes]:
    """Return hunk lines with the source's own line ends if the diff has lost its own."""
    if diff.crlf and b"\r\n" in source:
        return [line[:-1] + b"\r\n" if line.endswith(b"\n") else line for line in lines]
    return list(lines)


def _in_order(rows: list[list[Placed]], diff: FileDiff, name: str) -> list[list[Placed]]:
    """Keep the places that leave room for the hunks before and after, in the diff's order."""
    ends, end = [], 0
    for hunk, row in zip(diff.hunks, rows, strict=True):
        ends.append(end)
        reachable = [placed.end for placed in row if placed.start >= end]
        if not reachable:
            raise DiffError(
                f"hunk {hunk.number} matches {name} only before the hunk that it follows",
                file=diff.name, line=hunk.line, found=f"line {row[0].line}",
            )  # fmt: skip
        end = min(reachable)
    kept: list[list[Placed]] = []
    limit = max(placed.end for placed in rows[-1])
    for row, end in zip(reversed(rows), reversed(ends), strict=True):
        kept.append([placed for placed in row if placed.start >= end and placed.end <= limit])
        limit = max(placed.start for placed in kept[-1])
    return kept[::-1]


def _choose(row: list[Placed], shifts: Collection[int | None], diff: FileDiff, name: str) -> Placed:
    """Return the place of a hunk that fits those of ``row``, with neighbours at ``shifts``."""
    likely = [placed for placed in row if placed.shift in shifts] or row
    nearest = min(abs(placed.shift) for placed in likely)
    chosen = [placed for placed in likely if abs(placed.shift) == nearest]
    if len(chosen) > 1:
        raise _ambiguous(chosen[0].hunk, chosen, diff, name)
    others = tuple(placed for placed in likely if placed != chosen[0])
    return replace(chosen[0], others=others if chosen[0].shift else ())


def _ambiguous(hunk: Hunk, row: list[Placed], diff: FileDiff, name: str) -> DiffError:
    shown = ", ".join(str(placed.line) for placed in row[:5]) + (", …" if len(row) > 5 else "")
    return DiffError(
        f"hunk {hunk.number} matches {name} in {len(row)} places equally well",
        file=diff.name, line=hunk.line,
        found=f"lines {shown}", expected="one", remedy="give the hunk more context lines",
    )  # fmt: skip


def module_path(module: str, *, package: bool) -> str:
    """Return the path that a diff of ``module`` names, such as vllm/v1/engine/core.py."""
    path = PurePosixPath(*module.split("."))
    return str(path / "__init__.py" if package else path.with_suffix(".py"))
