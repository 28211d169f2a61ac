"""A recipe's serve flags checked against vLLM's own parser, and written as its arguments.

The canonical form of a set of flags is a mapping from a flag's long name (dashes, none leading) to
its value: bool for a switch, list for a flag that takes several, mapping for a JSON flag.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vllm_overlay.errors import ConfigError, did_you_mean, nearest
from vllm_overlay.flagvalues import ValueProblem, convert, to_text
from vllm_overlay.parsertable import ParserTable, vllm_refuses
from vllm_overlay.upstream import Tree

NOT_FLAGS = {
    "model": "the recipe's 'model' key names the model",
    "config": "the recipe takes the place of vLLM's config file: write its flags under 'serve'",
    "api-key": "set VLLM_API_KEY in the environment: a secret is never kept in a plan",
    "hf-token": "set HF_TOKEN in the environment: a secret is never kept in a plan",
    "help": "run 'vllm serve --help=all'",
}


class Place(Protocol):
    """Where something is written; line and column count from 1."""

    @property
    def file(self) -> Path | str: ...
    @property
    def line(self) -> int | None: ...
    @property
    def column(self) -> int | None: ...


PlaceOf = Callable[[tuple[str, ...]], Place | None]


@dataclass(frozen=True)
class CommandLine:
    """The place of everything that is given on the command line."""

    file: str = "command line"
    line: None = None
    column: None = None


COMMAND_LINE = CommandLine()


@dataclass(frozen=True)
class Override:
    """A recipe's flag whose value the command line replaced."""

    flag: str
    recipe: object
    now: object


@dataclass(frozen=True)
class Part:
    """One ``--flag.path value``: sets, or with ``+`` appends to, a part of a JSON flag."""

    path: tuple[str, ...]
    value: object
    append: bool = False


@dataclass(frozen=True)
class Parts:
    """The parts of one JSON flag that the command line changes, in the order given."""

    parts: tuple[Part, ...]


def check_serve(
    serve: Mapping[str, object], table: ParserTable, place: PlaceOf | None = None
) -> list[ConfigError]:
    """Return every flag that the parser does not know, and every value that it cannot take.

    ``place((flag, key inside it, ...))`` tells where the recipe says so.
    """
    errors: list[ConfigError] = []
    first: dict[str, str] = {}
    for key, value in serve.items():
        where = _where(place, (key,))
        found = table.find(key)
        if found is None or found[0].name in NOT_FLAGS:
            errors.append(unknown_flag(key, table, where))
            continue
        name = found[0].name
        if name in first:
            what = f"flag '{name}' is given twice, as '{first[name]}' and as '{key}'"
            errors.append(error_at(where, what, remedy=f"keep one, written '{name}'"))
            continue
        first[name] = key
        try:
            result = convert(*found, value)
        except ValueProblem as problem:
            errors.append(value_error(key, problem, where))
        else:
            errors += check_fields(result, found[0].fields, (key,), place)
    return errors


def check_fields(
    value: object, fields: Mapping[str, Any] | None, path: tuple[str, ...], place: PlaceOf | None
) -> list[ConfigError]:
    """Return each key inside a JSON flag that vLLM's class for it has no field for."""
    if fields is None or not isinstance(value, Mapping):
        return []
    errors: list[ConfigError] = []
    for key, inner in value.items():
        name = str(key).replace("-", "_")
        below = (*path, str(key))
        if name in fields:
            errors += check_fields(inner, fields[name], below, place)
        else:
            what = f"unknown key '{key}' in flag '{'.'.join(path)}'"
            errors.append(error_at(_where(place, below), what, remedy=did_you_mean(name, fields)))
    return errors


def canonical(serve: Mapping[str, object], table: ParserTable) -> dict[str, object]:
    """Return flags in canonical form; what ``check_serve`` refuses stays as it is."""
    result: dict[str, object] = {}
    for key, value in serve.items():
        found = table.find(key)
        try:
            result[found[0].name if found else key] = convert(*found, value) if found else value
        except ValueProblem:
            result[key] = value
    return result


def merge(
    recipe_serve: Mapping[str, object], extra: Mapping[str, object], table: ParserTable
) -> tuple[dict[str, object], list[Override]]:
    """Return the recipe's flags with those of ``parse_extra`` over them, and what those replaced.

    A flag replaces the recipe's value as a whole; ``--flag.part`` changes only that part.
    Raises ConfigError for a part of a value that has no parts.
    """
    merged = canonical(recipe_serve, table)
    overrides: list[Override] = []
    for name, value in extra.items():
        if isinstance(value, Parts):
            merged[name] = _with_parts(name, merged.get(name, {}), value, overrides)
            continue
        if name in merged and merged[name] != value:
            overrides.append(Override(name, merged[name], value))
        merged[name] = value
    return merged, overrides


def _with_parts(name: str, old: object, parts: Parts, overrides: list[Override]) -> object:
    result = copy.deepcopy(old)
    for part in parts.parts:
        level: Any = result
        *above, last = part.path
        for step in above:
            level = level.setdefault(step, {}) if isinstance(level, dict) else None
        flag = ".".join((name, *part.path))
        before = level.get(last) if isinstance(level, dict) else None
        if not isinstance(level, dict) or (part.append and not isinstance(before, list | None)):
            raise error_at(
                COMMAND_LINE,
                f"flag '--{flag}' changes a part of a value that has no such part",
                found=to_text(old),
                remedy=f"give '--{name}' as a whole",
            )
        now = [*(before or ()), *_items(part.value)] if part.append else part.value
        if last in level and before != now:
            overrides.append(Override(flag, before, now))
        level[last] = now
    return result


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def to_argv(serve: Mapping[str, object], table: ParserTable) -> list[str]:
    """Return flags that ``check_serve`` has passed as arguments for ``vllm serve MODEL``.

    ``--flag=value`` wherever vLLM's parser allows it: a value may then begin with a dash.
    """
    argv: list[str] = []
    for name, value in canonical(serve, table).items():
        option = table.by_string[f"--{name}"]
        string = f"--{name}"
        if option.truth is not None:
            # A switch without a spelling for its value has that value when it is not given.
            argv += filter(None, [option.spelling(bool(value))])
        elif option.bare and value is True:
            argv.append(string)
        elif option.append:
            argv += [f"{string}={to_text(item)}" for item in _items(value)]
        elif option.several and len(_items(value)) != 1:
            argv += [string, *(to_text(item) for item in _items(value))]
        else:
            argv.append(f"{string}={to_text(_items(value)[0] if option.several else value)}")
    return argv


def check_argv(
    model: str,
    argv: Sequence[str],
    tree: Tree,
    home: Path,
    environ: Mapping[str, str],
    place: PlaceOf | None = None,
) -> list[ConfigError]:
    """Return what vLLM's own parser, and its checks of the parsed flags, say against ``argv``.

    This catches what no table holds: values inside JSON flags, flags that need each other.
    """
    message = vllm_refuses(["serve", model, *argv], tree, home, environ)
    if message is None:
        return []
    named = re.match(r"argument --([\w-]+)\S*: (.*)", message)
    if named is None:
        return [error_at(_where(place, ()), f"vLLM refuses the flags: {message}")]
    where = _where(place, (named[1],))
    return [error_at(where, f"vLLM refuses flag '{named[1]}': {named[2]}")]


def unknown_flag(key: str, table: ParserTable, where: Place | None) -> ConfigError:
    """Return the error for a flag that is no flag of vLLM's, or not one to be set like this."""
    bare = key.lstrip("-").replace("_", "-")
    if bare in NOT_FLAGS:
        return error_at(where, f"flag '{bare}' is not taken here", remedy=NOT_FLAGS[bare])
    known = {*table.names(), *(s[2:] for s in table.by_string if s.startswith("--"))}
    short = table.by_string.get(f"-{bare}")
    near = short.name if short else nearest(bare, known - {*NOT_FLAGS})
    remedy = f"did you mean '{near}'?" if near else "'vllm serve --help=all' lists the flags"
    return error_at(where, f"unknown flag '{key}' of vllm serve", remedy=remedy)


def value_error(key: str, problem: ValueProblem, where: Place | None) -> ConfigError:
    """Return the error for a value that the flag ``key`` cannot take."""
    what = f"wrong value for flag '{key}'"
    return error_at(
        where, what, found=problem.found, expected=problem.expected, remedy=problem.remedy
    )


def error_at(
    where: Place | None,
    what: str,
    *,
    found: object = None,
    expected: object = None,
    remedy: str | None = None,
) -> ConfigError:
    """Return a ConfigError with its place, if that is known."""
    return ConfigError(
        what,
        file=where.file if where else None,
        line=where.line if where else None,
        column=where.column if where else None,
        found=found,
        expected=expected,
        remedy=remedy,
    )


def _where(place: PlaceOf | None, path: tuple[str, ...]) -> Place | None:
    return place(path) if place else None
