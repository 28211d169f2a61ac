"""A diff from outside, taken apart: plain or in git's form, a mail, or several commits in a row.

Only where a file's part begins and ends is decided here; its hunks are read by ``diffs``.
"""

from __future__ import annotations

import email
import email.errors
import email.header
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm_overlay import diffs
from vllm_overlay.diffs import DiffError, FileDiff
from vllm_overlay.errors import one_line

LINKS = ("120000", "160000")  # the modes of a symbolic link and of a submodule
MAX_LINES = 100_000  # each costs unidiff some hundred bytes
MAX_PARTS = 5000
MAX_PROSE = 64 << 10  # bytes of mail and commit messages that are looked at
_HUNK = re.compile(rb"@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")
_HEADERS = re.compile(
    rb"(old mode|new mode|new file mode|deleted file mode|copy from|copy to|rename from|rename to"
    rb"|similarity index|dissimilarity index|index) (.*)"
)
_BINARY_DATA = re.compile(rb"((literal|delta) \d+|[A-Za-z][!-~]*)?")
_URL = re.compile(r"https?://[^\s<>\"')\]]+")


@dataclass(frozen=True)
class Part:
    """What one commit does to one file.

    ``kind`` is change, new, deleted, renamed, copied or mode. ``hunks`` are the lines of ``diff``
    as they stand, from the first @@ on. ``line`` counts from 1 in the whole diff, ``commit`` from
    0: parts of one commit go by the same state of the files.
    """

    kind: str
    line: int
    old_path: str | None
    new_path: str | None
    diff: FileDiff | None
    hunks: bytes
    binary: bool
    link: bool
    commit: int

    @property
    def path(self) -> str:
        return self.new_path or self.old_path or ""


@dataclass(frozen=True)
class PublicDiff:
    """Every part of a diff, the subject of its first mail, and the page that its text names."""

    parts: tuple[Part, ...]
    subject: str | None
    url: str | None


@dataclass
class _Section:
    """The lines of one part: git's header, then ``body`` from --- to the end of the last hunk."""

    start: int
    commit: int
    git: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    binary: bool = False
    body: tuple[int, int] | None = None


def read(text: bytes, name: str) -> PublicDiff:
    """Return a diff's parts in order. ``name`` is what errors call it. Raises DiffError."""
    if text.count(b"\n") > MAX_LINES:
        raise DiffError("the diff is too long", file=name, expected=f"at most {MAX_LINES} lines")
    lines = [line + b"\n" for line in text.removesuffix(b"\n").split(b"\n")]
    sections, prose = _sections(lines, name)
    if not sections:
        raise DiffError("no unified diff found", file=name, expected="--- and +++ lines")
    if len(sections) > MAX_PARTS:
        expected = f"at most {MAX_PARTS}"
        raise DiffError("the diff changes too many files", file=name, expected=expected)
    parts = tuple(_part(section, lines, name) for section in sections)
    return PublicDiff(parts, _subject(prose), _url(prose))


def _sections(lines: Sequence[bytes], name: str) -> tuple[list[_Section], bytes]:
    """Return the sections, and all the text around them."""
    found: list[_Section] = []
    prose: list[bytes] = []
    commit, at = 0, 0
    header: _Section | None = None  # git's, not yet followed by its hunks
    while at < len(lines):
        line = lines[at].rstrip(b"\r\n")
        begins = line.startswith(b"--- ") and lines[at + 1 : at + 2] and _target(lines[at + 1])
        if line.startswith(b"diff --git "):
            header = _Section(at, commit, git=line)
            found.append(header)
        elif begins:
            if header is None:
                found.append(_Section(at, commit))
            end = _end_of_hunks(lines, at + 2)
            found[-1].body = (at, end)
            header, at = None, end
            continue
        elif line.startswith((b"diff --cc ", b"diff --combined ", b"@@@")):
            what = "the combined diff of a merge has no one side to apply to"
            raise DiffError(what, file=name, line=at + 1, expected="the diff of git diff A B")
        elif line.startswith(b"@@"):
            what = "a hunk without the file that it changes, or a header that is not understood"
            raise DiffError(what, file=name, line=at + 1)
        elif header and (match := _HEADERS.fullmatch(line)):
            header.headers[match[1]] = match[2]
        elif header and line.startswith((b"GIT binary patch", b"Binary files ")):
            header.binary = True
            at = _end_of_binary(lines, at + 1)
            header = None
            continue
        elif line.strip():
            header = None
            commit += not (prose and prose[-1].strip())
            prose.append(lines[at])
        else:
            prose.append(lines[at])
        at += 1
    return found, b"".join(prose)[:MAX_PROSE]


def _target(line: bytes) -> bool:
    return line.startswith(b"+++ ")


def _end_of_hunks(lines: Sequence[bytes], at: int) -> int:
    """Return the index behind the hunks that begin at ``at``, and behind a line too many."""
    while at < len(lines) and (header := _HUNK.match(lines[at])):
        old, new = (int(count) if count is not None else 1 for count in header.groups())
        at += 1
        while at < len(lines) and (old > 0 or new > 0 or lines[at].startswith(b"\\")):
            kind = lines[at][:1]
            old -= kind not in (b"+", b"\\")
            new -= kind not in (b"-", b"\\")
            at += 1
    following = lines[at] if at < len(lines) else b""
    fine = following.startswith(b"--- ") or following.rstrip() == b"--"
    lost = following.startswith((b"+", b"-", b" ", b"@@")) and not fine
    return at + lost  # diffs.parse refuses it, with its place


def _end_of_binary(lines: Sequence[bytes], at: int) -> int:
    while at < len(lines) and _BINARY_DATA.fullmatch(lines[at].rstrip(b"\r\n")):
        at += 1
    return at


# --- one part ---


def _part(section: _Section, lines: Sequence[bytes], name: str) -> Part:
    headers = {key.decode(): _text(value) for key, value in section.headers.items()}
    diff, hunks = None, b""
    if section.body:
        start, end = section.body
        diff = _parse(lines[start:end], start, name)
        hunks = b"".join(lines[start + 2 : end])
        old, new = diff.old_path, diff.new_path
        last = diff.hunks[-1]
        if not (section.git or last.new_start or last.new):  # as diff -N writes a deletion
            new = None
    else:
        old, new = _paths(section, headers, name)
    if "" in (old, new) or (old, new) == (None, None):
        raise DiffError("the diff names no file", file=name, line=section.start + 1)
    kind = _kind(old, new, headers, diff is not None or section.binary)
    modes = [value for key, value in headers.items() if key.endswith("mode")]
    modes += headers.get("index", "").split()[1:]
    link = any(mode in LINKS for mode in modes)
    return Part(
        kind, section.start + 1, old, new, diff, hunks, section.binary, link, section.commit
    )


def _parse(body: Sequence[bytes], start: int, name: str) -> FileDiff:
    """Return the one file's diff, with the lines that it has in the whole."""
    try:
        (diff,) = diffs.parse(b"".join(body), name)
    except DiffError as error:
        line = error.line + start if error.line else start + 1
        raise DiffError(error.what, file=name, line=line, expected=error.expected) from None
    hunks = tuple(replace(hunk, line=hunk.line + start) for hunk in diff.hunks)
    if not hunks:
        raise DiffError("the file has no hunk", file=name, line=start + 1)
    return replace(diff, hunks=hunks)


def _paths(section: _Section, headers: dict[str, str], name: str) -> tuple[str | None, str | None]:
    """Return the paths of a part without hunks."""
    for kind in ("rename", "copy"):
        if f"{kind} from" in headers and f"{kind} to" in headers:
            return headers[f"{kind} from"].strip('"'), headers[f"{kind} to"].strip('"')
    both = _text(section.git.removeprefix(b"diff --git "))
    half = len(both) // 2  # without a rename both sides are the same path
    old, new = (side.strip('"') for side in (both[:half], both[half + 1 :]))
    path = old.removeprefix("a/")
    if both[half : half + 1] != " " or path != new.removeprefix("b/"):
        raise DiffError("git's header is not understood", file=name, line=section.start + 1)
    return None if "new file mode" in headers else path, (
        None if "deleted file mode" in headers else path
    )


def _kind(old: str | None, new: str | None, headers: dict[str, str], content: bool) -> str:
    if old is None:
        return "new"
    if new is None:
        return "deleted"
    if "copy to" in headers:
        return "copied"
    if old != new:
        return "renamed"
    return "change" if content else "mode"


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


# --- the text around ---


def _subject(prose: bytes) -> str | None:
    """Return the first mail's subject in one line, without git's ``[PATCH 1/2]``."""
    try:
        raw = email.message_from_bytes(prose.lstrip())["Subject"]
        text = str(email.header.make_header(email.header.decode_header(raw))) if raw else ""
    except (email.errors.MessageError, LookupError, UnicodeError, ValueError):
        return None
    return one_line(" ".join(re.sub(r"^\s*\[PATCH[^\]]*\]", "", text).split())) or None


def _url(prose: bytes) -> str | None:
    """Return the address of a pull request or commit that the text names, else its first one."""
    found = [one_line(url).rstrip(".,;:") for url in _URL.findall(_text(prose))]
    pages = [url for url in found if "/pull/" in url or "/commit/" in url]
    return next(iter(pages + found), None)
