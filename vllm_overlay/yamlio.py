"""Strict YAML with positions: what a recipe or a fix.yaml may be written in.

The subset is what reads the same to everyone: one document, maps with text keys, lists, text,
numbers, true/false and null. Anchors, aliases, tags, merge keys, tabs, duplicate keys and scalars
that YAML 1.1 and 1.2 read differently (``on``, ``1_000``, ``017``) are refused with their place.
One addition: ``+[a, b]`` is a list that is appended to the parent's list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vllm_overlay.errors import ConfigError
from vllm_overlay.files import MAX_BYTES
from vllm_overlay.scalars import Scalar, read_scalar

MAX_DEPTH = 32
MAX_NODES = 20_000

Plain = Scalar | list["Plain"] | dict[str, "Plain"]


@dataclass(frozen=True)
class Place:
    """Where something stands; line and column count from 1."""

    file: Path
    line: int
    column: int

    def error(
        self,
        what: str,
        *,
        found: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> ConfigError:
        """Return an error that points here."""
        return ConfigError(
            what,
            file=self.file,
            line=self.line,
            column=self.column,
            found=found,
            expected=expected,
            remedy=remedy,
        )


@dataclass(frozen=True)
class Node:
    """A YAML value with its place.

    ``keys`` holds the place of each key of a map, ``written`` a scalar's text as it stands in the
    file, ``append`` marks a list that is written ``+[...]``, and ``bad`` a value that has an error
    already, so that no second one is reported for it.
    """

    place: Place
    value: Scalar | tuple[Node, ...] | dict[str, Node]
    keys: Mapping[str, Place] = field(default_factory=dict)
    written: str = ""
    quoted: bool = False
    append: bool = False
    bad: bool = False

    def child(self, step: str | int) -> Node | None:
        """Return a map's value or a list's item; None if there is none, or this is neither."""
        if isinstance(self.value, dict) and isinstance(step, str):
            return self.value.get(step)
        if (
            isinstance(self.value, tuple)
            and isinstance(step, int)
            and step in range(len(self.value))
        ):
            return self.value[step]
        return None

    def plain(self) -> Plain:
        """Return the value as ordinary Python lists, dicts and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain() for node in self.value]
        return self.value


@dataclass(frozen=True)
class Places:
    """Answers where a key or a list item of a document stands."""

    root: Node

    def at(self, *path: str | int) -> Place:
        """Return the place of the key or item at ``path``, else of its nearest ancestor."""
        node, place = self.root, self.root.place
        for step in path:
            child = node.child(step)
            if child is None:
                break
            place = node.keys[step] if isinstance(step, str) else child.place
            node = child
        return place


def describe(node: Node) -> str:
    """Return what a value is, for a message: ``text 'a'``, ``the number 1``, ``a map``."""
    value = node.value
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, tuple):
        return "a list"
    shown = shorten(node.written)
    if isinstance(value, bool):
        return f"the truth value {shown}"
    if isinstance(value, str):
        return f"the text '{shown}'"
    return f"the number {shown}"


def shorten(text: str, limit: int = 60) -> str:
    """Return text, cut to ``limit`` characters for a message."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def parse(data: bytes, file: Path) -> tuple[Node | None, list[ConfigError]]:
    """Return a document's root (None if it cannot be read at all) and every error in it."""
    if len(data) > MAX_BYTES:
        expected = f"at most {MAX_BYTES // 1024} KiB"
        return None, [ConfigError("the file is too large", file=file, expected=expected)]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        found = f"the byte 0x{data[error.start]:02x}"
        place = Place(file, line, column)
        return None, [place.error("the file is not UTF-8", found=found, remedy="save it as UTF-8")]
    errors = _bad_characters(text, file)
    if errors:
        return None, errors
    return _Builder(text, file).build()


# Characters that YAML refuses or that it takes for a line break where editors do not, and what to
# do about those that people meet.
_BAD_CHARACTER = re.compile(
    "[^\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_CHARACTER_HELP = {
    "\t": ("a tab", "indent with spaces; in a text write \\t inside double quotes"),
    "\r": ("a carriage return", "save the file with Unix line ends (LF)"),
    "\ufeff": ("a byte order mark", "save the file as UTF-8 without one"),
    "\0": ("a NUL byte", "remove it"),
}


def _bad_characters(text: str, file: Path) -> list[ConfigError]:
    """Return one error for each kind of refused character, at its first place."""
    first: dict[str, int] = {}
    for match in _BAD_CHARACTER.finditer(text):
        first.setdefault(match.group(), match.start())
    errors = []
    for character, index in list(first.items())[:5]:
        name, remedy = _CHARACTER_HELP.get(
            character, (f"the control character U+{ord(character):04X}", "remove it")
        )
        line = text.count("\n", 0, index) + 1
        column = index - text.rfind("\n", 0, index)
        errors.append(Place(file, line, column).error(f"{name} is not allowed", remedy=remedy))
    return errors


class _Loader(yaml.SafeLoader):
    """PyYAML's scanner and parser, with ``+[`` as the start of a list."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.appending: set[int] = set()

    def fetch_plain(self) -> None:
        if self.prefix(2) != "+[":
            super().fetch_plain()
            return
        self.forward()
        self.appending.add(self.index)
        self.fetch_flow_sequence_start()

    def take(self) -> Any:
        """Return the next event and go on."""
        return self.get_event()  # type: ignore[no-untyped-call]

    def next(self) -> Any:
        """Return the next event without going on."""
        return self.peek_event()  # type: ignore[no-untyped-call]


class _Refused(Exception):
    """The document ends here: reading on would cost too much."""


class _Builder:
    """Turns PyYAML's events into nodes and collects the errors."""

    def __init__(self, text: str, file: Path) -> None:
        self.file = file
        self.loader = _Loader(text)
        self.errors: list[ConfigError] = []
        self.nodes = 0

    def build(self) -> tuple[Node | None, list[ConfigError]]:
        try:
            return self._document(), self.errors
        except _Refused:
            return None, self.errors
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark or self.loader.get_mark()
            self.errors.append(self._syntax(error, self._place(mark)))
        except (ValueError, OverflowError):  # PyYAML lets chr() and int() raise
            place = self._place(self.loader.get_mark())
            self.errors.append(place.error("a number or an escape here is out of range"))
        finally:
            self.loader.dispose()
        return None, self.errors

    def _syntax(self, error: yaml.MarkedYAMLError, place: Place) -> ConfigError:
        problem = error.problem or error.context or "it cannot be parsed"
        remedy = next((text for part, text in _SYNTAX_HELP if part in problem), None)
        return place.error(f"this is not valid YAML: {problem}", remedy=remedy)

    def _document(self) -> Node | None:
        loader = self.loader
        loader.take()
        if loader.check_event(yaml.StreamEndEvent):
            self.errors.append(Place(self.file, 1, 1).error("the file is empty"))
            return None
        start = loader.take()
        if start.version or start.tags:
            self._refuse(start, "YAML directives are not allowed", "remove the line")
        root = self._node(1)
        loader.take()
        if not loader.check_event(yaml.StreamEndEvent):
            self._refuse(
                loader.next(),
                "a second YAML document begins here",
                "keep one document a file",
            )
        return root

    def _place(self, mark: Any) -> Place:
        return Place(self.file, mark.line + 1, mark.column + 1)

    def _refuse(self, event: Any, what: str, remedy: str, found: str | None = None) -> None:
        place = self._place(event.start_mark)
        self.errors.append(place.error(what, found=found, remedy=remedy))

    def _node(self, depth: int) -> Node:
        event = self.loader.take()
        place = self._place(event.start_mark)
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_NODES} values"
            self.errors.append(place.error("the document is too large", expected=f"up to {limit}"))
            raise _Refused
        start = event.start_mark.index
        if isinstance(event, yaml.AliasEvent):
            found = f"*{shorten(str(event.anchor))}"
            self._refuse(event, "an alias is not allowed", _WRITE_OUT, found)
            return Node(place, None, bad=True)
        bad = self._marked(event)
        if isinstance(event, yaml.MappingStartEvent):
            return self._map(place, depth, bad)
        if isinstance(event, yaml.SequenceStartEvent):
            append = start in self.loader.appending
            items = []
            while not self.loader.check_event(yaml.SequenceEndEvent):
                items.append(self._node(depth + 1))
            self.loader.take()
            return Node(place, tuple(items), append=append, bad=bad)
        return self._scalar(event, place, bad)

    def _marked(self, event: Any) -> bool:
        """Refuse an anchor and a tag."""
        if event.anchor is not None:
            found = f"&{shorten(event.anchor)}"
            self._refuse(event, "an anchor is not allowed", _WRITE_OUT, found)
        tag = event.tag
        if tag is not None:
            self._refuse(event, "a tag is not allowed", "remove it", shorten(tag))
        return tag is not None

    def _map(self, place: Place, depth: int, bad: bool) -> Node:
        values: dict[str, Node] = {}
        keys: dict[str, Place] = {}
        while not self.loader.check_event(yaml.MappingEndEvent):
            key = self._key(self._node(depth + 1))
            value = self._node(depth + 1)
            if key is None:
                continue
            if key.written in keys:
                first = keys[key.written]
                self.errors.append(
                    key.place.error(
                        f"the key '{shorten(key.written)}' is there twice",
                        remedy=f"the first is in line {first.line}; keep one of them",
                    )
                )
                continue
            values[key.written], keys[key.written] = value, key.place
        self.loader.take()
        return Node(place, values, keys=keys, bad=bad)

    def _key(self, node: Node) -> Node | None:
        """Return the node of a key that is text; else record an error and return None."""
        if node.bad:
            return None
        if node.written == "<<" and not node.quoted:
            what, remedy = "the merge key << is not allowed", _WRITE_OUT
        elif isinstance(node.value, str):
            return node
        else:
            what = f"a key must be text, not {describe(node)}"
            scalar = not isinstance(node.value, dict | tuple) and node.written
            remedy = f'quote it: "{shorten(node.written)}"' if scalar else "write a name"
        self.errors.append(node.place.error(what, remedy=remedy))
        return None

    def _scalar(self, event: Any, place: Place, bad: bool) -> Node:
        text: str = event.value
        if event.style is not None:
            unusable = re.search("[\0\ud800-\udfff]", text)
            if unusable:
                found = f"U+{ord(unusable.group()):04X}"
                self._refuse(event, "this text cannot be used", "remove the character", found)
            return Node(place, text, written=text, quoted=True, bad=bad or unusable is not None)
        value, problem = read_scalar(text)
        if problem and not bad:
            self._refuse(event, problem[0], problem[1], f"'{shorten(text)}'")
        return Node(place, value, written=text, bad=bad or problem is not None)


_WRITE_OUT = "write the value out where it is used"
_SYNTAX_HELP = (
    ("mapping values are not allowed", "indent it, or quote a value that contains ': '"),
    ("expected chomping or indentation", "quote a value that begins with > or |"),
    ("cannot start any token", "quote a value that begins with this character"),
    ("could not find expected ':'", "write 'key: value', and quote a text of several lines"),
    ("expected <block end>", "check the indentation of this line"),
    ("expected ',' or", "check the brackets, commas and quotes before this place"),
    ("unexpected end of stream", "close the bracket or quote that is still open"),
)
