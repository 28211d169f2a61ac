"""A list of command-line words and a map of variables, as a recipe's ``serve`` and ``env``.

Read without vLLM's parser: the recipe may be for a release that is not installed.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vllm_overlay.errors import ConfigError
from vllm_overlay.recipe_format import Environment, ServeFlags
from vllm_overlay.yamlio import Node, Place, shorten

_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_SHELL = re.compile(r"\$[A-Za-z_{(]")
_FLAGS: TypeAdapter[Any] = TypeAdapter(ServeFlags)
_VARIABLES: TypeAdapter[Any] = TypeAdapter(Environment)


@dataclass(frozen=True)
class Setting:
    """One flag, or one key of a flag's map (``path``), that a list of words sets."""

    name: str
    path: tuple[str, ...]
    value: Any
    place: Place


def left_out(place: Place, what: str, why: str) -> ConfigError:
    """Return the line that says what was not carried over, and why."""
    return place.error(f"not carried over: {what}: {why}")


def read_words(words: Sequence[Node]) -> tuple[list[Setting], list[ConfigError]]:
    """Return what the words of a command line set, in order, and what could not be read."""
    settings: list[Setting] = []
    notes: list[ConfigError] = []
    rest = [*words]
    while rest:
        head = rest.pop(0)
        word, _, tail = head.written.partition(" ")  # "--flag value" in one item of the list
        name, equals, value = word.partition("=")
        given = [f"{value} {tail}".rstrip() if tail else value] if equals else []
        given += [tail.strip()] if tail and not equals else []
        while rest and not _is_flag(rest[0].written) and not equals:
            given.append(rest.pop(0).written)
        shown = shorten(name)
        if not name.startswith("--"):
            why = "a short option" if name.startswith("-") else "it belongs to no flag"
            notes.append(left_out(head.place, shown, why))
        elif problem := _problem(name, given):
            notes.append(left_out(head.place, shown, problem))
        else:
            settings.append(_setting(name, given, head.place))
    return settings, notes


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d*\.?\d+", word)


def _problem(name: str, given: Sequence[str]) -> str | None:
    """Return why a recipe cannot hold a flag; its value may be a secret and is never shown."""
    base, *path = name.removeprefix("--").replace("_", "-").split(".")
    if any(_SHELL.search(value) for value in given):
        return "its value names a shell variable"
    if path and (len(given) != 1 or path[-1].endswith("+") or not all(path)):
        return "a part of a flag with no single value"
    return _refusal(_FLAGS, base, True)


def _refusal(adapter: TypeAdapter[Any], name: str, value: object) -> str | None:
    """Return what the recipe's format says against one key."""
    try:
        adapter.validate_python({name: value}, strict=True)
    except ValidationError as error:
        context = error.errors(include_url=False)[0].get("ctx", {})
        parts = [context.get("what") or "no recipe can hold it", context.get("remedy")]
        return "; ".join(part for part in parts if part)
    return None


def _setting(name: str, given: Sequence[str], place: Place) -> Setting:
    base, *path = name.removeprefix("--").split(".")
    base = base.replace("_", "-")
    if path:
        return Setting(base, tuple(path), _part(given[0]), place)
    if not given:  # vLLM's switches have both spellings
        bare = base.removeprefix("no-")
        return Setting(bare, (), bare == base, place)
    values = [_value(text) for text in given]
    return Setting(base, (), values[0] if len(values) == 1 else values, place)


def _value(text: str) -> Any:
    """Return a whole number, JSON's map or list, or else the text: 0.90 may be a version."""
    if _NUMBER.fullmatch(text):
        return int(text)
    value = _part(text) if text[:1] in ("{", "[") else text
    return value if isinstance(value, dict | list) else text


def _part(text: str) -> Any:
    """Return JSON, else the text: as vLLM reads ``--flag.key value``."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key is there twice")
        return dict(pairs)

    def no_number(word: str) -> Any:
        raise ValueError(word)

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=no_number)
    except (ValueError, RecursionError):
        return text


def apply_settings(serve: dict[str, Any], settings: Sequence[Setting]) -> list[ConfigError]:
    """Put settings into ``serve``, later ones over earlier ones as on a command line."""
    notes = []
    for item in settings:
        if not item.path:
            serve[item.name] = item.value
            continue
        top = copy.deepcopy(serve.get(item.name, {}))
        level = top
        for step in item.path[:-1]:
            level = level.setdefault(step, {}) if isinstance(level, dict) else None
        if not isinstance(level, dict):
            what = f"--{item.name}.{'.'.join(item.path)}"
            notes.append(left_out(item.place, what, "the flag's value has no parts"))
            continue
        level[item.path[-1]] = item.value
        serve[item.name] = top
    return notes


def read_variables(node: Node) -> tuple[dict[str, str], list[ConfigError]]:
    """Return the variables of a map, and what could not be carried over."""
    found: dict[str, str] = {}
    notes: list[ConfigError] = []
    values = node.value if isinstance(node.value, dict) else {}
    for name, value in values.items():
        place = node.keys[name]
        whole = type(value.value) is int and _NUMBER.fullmatch(value.written)
        if problem := _refusal(_VARIABLES, name, ""):
            notes.append(left_out(place, f"the variable {shorten(name)}", problem))
        elif not isinstance(value.value, str) and not whole:
            why = "it is no text, and readers write it differently; quote it in the file"
            notes.append(left_out(place, f"the variable {name}", why))
        elif _SHELL.search(value.written):
            notes.append(left_out(place, f"the variable {name}", "it names a shell variable"))
        else:
            found[name] = value.written
    return found, notes
