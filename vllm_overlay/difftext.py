"""What a public diff makes of the modules of one vLLM: each file before and after."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_overlay import diffs, scope
from vllm_overlay.border import raise_problems
from vllm_overlay.diffs import DiffError, FileDiff
from vllm_overlay.errors import ConfigError, ConfigErrors, did_you_mean
from vllm_overlay.files import is_file
from vllm_overlay.gitdiff import Part, PublicDiff
from vllm_overlay.upstream import Tree


@dataclass(frozen=True)
class Change:
    """A module's file before and after. ``before`` is None for a new one; ``diff`` leads from one
    to the other and is empty for a new one."""

    path: str
    before: bytes | None
    after: bytes
    diff: bytes


def changes(
    public: PublicDiff, tree: Tree, name: str
) -> tuple[list[Change], list[tuple[str, str]]]:
    """Return what the diff does to vLLM's modules, and the files that are left out with a word why.

    Commit after commit is applied to the files of ``tree``. ``name`` is what errors call the diff.
    Raises ConfigError(s): every file that cannot be changed at import time, else every hunk that
    does not fit.
    """
    wanted: list[Part] = []
    left_out: dict[str, str] = {}
    refused: list[ConfigError] = []
    for part in public.parts:
        why = _left_out(part)
        if why:
            left_out.setdefault(part.path, why)
            continue
        reasons = _refusals(part)
        refused += [ConfigError(reason, file=name, line=part.line) for reason in reasons]
        if not reasons:
            wanted.append(part)
    raise_problems(refused, Path(name))
    files = _Files(tree, name)
    for part in wanted:
        files.take(part)
    raise_problems(files.errors, Path(name))
    found = list(files.changed())
    raise_problems(files.errors, Path(name))
    return found, list(left_out.items())


def _left_out(part: Part) -> str | None:
    sides = {path: scope.left_out(path) for path in (part.old_path, part.new_path) if path}
    if part.kind == "copied":
        sides.pop(part.old_path or "")
    if all(sides.values()):
        return next(iter(sides.values()))
    if part.kind == "mode" and scope.refusal(part.path) is None:
        return "changes only the file's mode"
    return None


def _refusals(part: Part) -> list[str]:
    found = []
    for path in dict.fromkeys(path for path in (part.old_path, part.new_path) if path):
        why = scope.refusal(path) if not scope.left_out(path) else None
        if why:
            found.append(f"{path}: {why}")
    if not found and part.link:
        found.append(f"{part.path}: a link or a submodule cannot be changed at import time")
    if not found and part.binary:
        found.append(f"{part.path}: a binary patch of a module cannot be read")
    return found


class _Files:
    """The files that the diff touches, as they are after the parts taken so far."""

    def __init__(self, tree: Tree, name: str) -> None:
        self.tree = tree
        self.name = name
        self.now: dict[str, bytes | None] = {}
        self.before_commit: dict[str, bytes | None] = {}
        self.commit = -1
        self.parts: dict[str, list[Part]] = defaultdict(list)
        self.failed: set[str] = set()
        self.errors: list[ConfigError] = []

    def take(self, part: Part) -> None:
        """Apply one part, or note why it cannot be applied."""
        if part.commit != self.commit:
            self.commit, self.before_commit = part.commit, dict(self.now)
        paths = [path for path in (part.old_path, part.new_path) if path]
        if self.failed.isdisjoint(paths):
            try:
                self._take(part)
                return
            except ConfigErrors as several:
                self.errors += several.errors
            except ConfigError as error:
                self.errors.append(error)
        self.failed.update(paths)  # what follows on such a file would only fail, too

    def _take(self, part: Part) -> None:
        text = self._text_before(part)
        after = text if part.diff is None else self._applied(text, part.diff, part)
        if part.kind in ("deleted", "renamed") and part.old_path:
            self.now[part.old_path] = None
            self.parts[part.old_path].append(part)
        if part.new_path:
            self.now[part.new_path] = after
            self.parts[part.new_path].append(part)

    def _text_before(self, part: Part) -> bytes:
        version = self.tree.version
        old = part.old_path
        if part.kind == "copied" and old:  # git means the file as it was before the commit
            text = self.before_commit[old] if old in self.before_commit else self._original(old)
        else:
            text = self._current(old or part.path)
        if old is None:
            if text is not None:
                raise self._error(part, f"{part.path}: vLLM {version} has this file already")
            return b""
        creates = part.diff and not part.diff.hunks[0].old_start and not part.diff.hunks[0].old
        if text is None and part.kind == "change" and creates:  # as diff -N writes it
            return b""
        if text is None:
            module = scope.module_of(old)
            hint = did_you_mean(module, self.tree.siblings(module)) if module else None
            raise self._error(part, f"{old}: vLLM {version} has no such file", hint)
        return text

    def _error(self, part: Part, what: str, remedy: str | None = None) -> ConfigError:
        return ConfigError(what, file=self.name, line=part.line, remedy=remedy)

    def _applied(self, text: bytes, diff: FileDiff, part: Part) -> bytes:
        """Return the text with the diff in it; else raise what is wrong with each hunk."""
        where = f"{part.old_path or part.path} of vLLM {self.tree.version}"
        try:
            return diffs.apply(text, diff, where)
        except DiffError as error:
            whole = error
        found: list[ConfigError] = []
        for hunk in diff.hunks:
            alone = replace(diff, hunks=(hunk,))
            try:
                diffs.place(text, alone, where)
            except DiffError as error:
                there = diffs.reverse_applies(text, alone)
                what = f"hunk {hunk.number} is in {where} already"
                found.append(DiffError(what, file=self.name, line=hunk.line) if there else error)
        raise ConfigErrors(found or [whole])

    def changed(self) -> Iterator[Change]:
        """Yield the files of vLLM that differ in the end; note those that are gone."""
        for path, after in self.now.items():
            before = self._original(path)
            if scope.left_out(path) or after == before or path in self.failed:
                continue
            parts = self.parts[path]
            if after is None:
                new = parts[-1].new_path
                why = f"renamed to {new}" if new else "deleted"
                what = f"{path}: it is {why}, and a module cannot be taken away at import time"
                self.errors.append(self._error(parts[-1], what))
            elif before is None:
                yield Change(path, None, after, b"")
            else:
                yield Change(path, before, after, _diff(path, before, after, parts))

    def _current(self, path: str) -> bytes | None:
        return self.now[path] if path in self.now else self._original(path)

    def _original(self, path: str) -> bytes | None:
        file = self.tree.root / path
        return file.read_bytes() if is_file(file) else None


def _diff(path: str, before: bytes, after: bytes, parts: list[Part]) -> bytes:
    """Return the diff of one file: the hunks as they came, or new ones over several parts."""
    names = f"a/{path}".encode(), f"b/{path}".encode()
    only = parts[0]
    if len(parts) == 1 and only.kind == "change" and only.diff:
        end = b"\r\n" if only.diff.crlf else b"\n"
        return b"--- " + names[0] + end + b"+++ " + names[1] + end + only.hunks
    old, new = diffs.split_lines(before), diffs.split_lines(after)
    made = difflib.diff_bytes(difflib.unified_diff, old, new, *names)
    return b"".join(
        line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
        for line in made
    )
