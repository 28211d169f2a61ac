"""Reads a YAML file of other people's, which may use more of YAML than our recipes do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from vllm_overlay.errors import ConfigError
from vllm_overlay.files import read_bytes
from vllm_overlay.recipe_format import MAX_LENGTH
from vllm_overlay.scalars import read_scalar
from vllm_overlay.yamlio import MAX_DEPTH, MAX_NODES, Node, Place, shorten


def read_foreign(file: Path) -> Node:
    """Return a file's document with aliases and merge keys written out, every value with its place.

    A scalar that YAML readers disagree on is text, as written. Raises ConfigError for what is no
    YAML, is too large once aliases are written out, or has a key twice.
    """
    try:
        text = read_bytes(file).decode("utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError:
        raise ConfigError("the file is not UTF-8", file=file) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file, 1, 1)
        raise place.error(f"this is not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        what = str(error).splitlines()[0] if str(error) else "it cannot be parsed"
        raise ConfigError(f"this is not valid YAML: {what}", file=file) from None
    except RecursionError:
        raise ConfigError("the document is nested too deeply", file=file) from None
    if root is None:
        raise ConfigError("the file is empty", file=file)
    return _Converter(file).node(root, 1)


class _Converter:
    """Turns PyYAML's graph, in which aliases share nodes, into a tree of bounded size."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.nodes = 0

    def node(self, node: Any, depth: int) -> Node:
        self.nodes += 1
        place = self._place(node)
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_NODES} values"
            raise place.error("the document is too large", expected=f"up to {limit}")
        if isinstance(node, yaml.MappingNode):
            return self._map(node, depth)
        if isinstance(node, yaml.SequenceNode):
            return Node(place, tuple(self.node(item, depth + 1) for item in node.value))
        if node.style is not None:
            return Node(place, node.value, written=node.value, quoted=True)
        return Node(place, read_scalar(node.value)[0], written=node.value)

    def _map(self, node: Any, depth: int) -> Node:
        values: dict[str, Node] = {}
        keys: dict[str, Place] = {}
        merged: list[Node] = []
        for key, value in node.value:
            place = self._place(key)
            if not isinstance(key, yaml.ScalarNode):
                raise place.error("a key must be text")
            if key.value == "<<" and key.style is None:
                below = self.node(value, depth + 1)
                merged += below.value if isinstance(below.value, tuple) else [below]
                continue
            if key.value in values:
                first = keys[key.value]
                what = f"the key '{key.value[:60]}' is there twice"
                raise place.error(what, remedy=f"the first is in line {first.line}")
            values[key.value], keys[key.value] = self.node(value, depth + 1), place
        for below in merged:  # the first that has a key wins, and the map's own key over all
            if not isinstance(below.value, dict):
                raise below.place.error("only a map can be merged with <<")
            values = {**below.value, **values}
            keys = {**below.keys, **keys}
        return Node(self._place(node), values, keys=keys)

    def _place(self, node: Any) -> Place:
        return Place(self.file, node.start_mark.line + 1, node.start_mark.column + 1)


def child(node: Node, *path: str) -> Node:
    """Return what lies at a path; a node with nothing in it where there is nothing."""
    for step in path:
        node = node.child(step) or Node(node.place, None)
    return node


def mapping(node: Node) -> Mapping[str, Node]:
    """Return a map's values, none for nothing. Raises ConfigError if it is something else."""
    if node.value is not None and not isinstance(node.value, dict):
        raise node.place.error("this must be a map", found=shorten(node.written) or "a list")
    return node.value or {}


def items(node: Node) -> tuple[Node, ...]:
    """Return a list's items, none for nothing. Raises ConfigError if it is something else."""
    if node.value is not None and not isinstance(node.value, tuple):
        raise node.place.error("this must be a list", found=shorten(node.written) or "a map")
    return node.value or ()


def text(node: Node, *path: str) -> str | None:
    """Return a text at a path, or None."""
    found = child(node, *path)
    return found.written if found.value is not None and found.written else None


def version(node: Node) -> Version:
    """Return a version. Raises ConfigError for what is none."""
    try:
        return Version(node.written[:MAX_LENGTH])
    except ValueError:
        raise node.place.error("this is no version", found=shorten(node.written)) from None


def one_line(words: str | None) -> str:
    """Return text in one line of at most ``MAX_LENGTH`` characters."""
    return shorten(" ".join((words or "").split()), MAX_LENGTH)
