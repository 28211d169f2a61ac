"""The serve flags given after the recipe on the command line, read as vLLM's parser reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from vllm_overlay.errors import ConfigError, raise_all
from vllm_overlay.flags import (
    COMMAND_LINE,
    NOT_FLAGS,
    Part,
    Parts,
    check_fields,
    error_at,
    unknown_flag,
    value_error,
)
from vllm_overlay.flagvalues import Option, ValueProblem, convert, size
from vllm_overlay.parsertable import ParserTable


def parse_extra(argv: Sequence[str], table: ParserTable) -> dict[str, object]:
    """Return the flags of ``argv`` in canonical form; a flag given by parts is a ``Parts``.

    Reads ``--flag value``, ``--flag=value``, ``--no-flag``, ``--flag a b``, short options, ``-O3``
    and ``--flag.part value``. Raises ConfigError(s) with every word that vLLM would not take, that
    is abbreviated, or that gives a flag twice (vLLM only warns and takes the last).
    """
    found: dict[str, Any] = {}
    errors: list[ConfigError] = []
    words = list(argv)
    while words:
        try:
            _read_flag(words, found, table)
        except ConfigError as error:
            errors.append(error)
            while words and not _is_flag(words[0]):  # what may be the values of the refused flag
                words.pop(0)
    for name, value in found.items():
        option = table.by_string[f"--{name}"]
        path = (name,)
        if isinstance(value, Parts):
            for part in value.parts:
                nested: Any = part.value
                for key in reversed(part.path):
                    nested = {key: nested}
                errors += check_fields(nested, option.fields, path, lambda _: COMMAND_LINE)
        else:
            errors += check_fields(value, option.fields, path, lambda _: COMMAND_LINE)
    raise_all(errors)
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-|-\d+|-\d*\.\d+", word)


def _read_flag(words: list[str], found: dict[str, Any], table: ParserTable) -> None:
    """Take one flag and its values off ``words`` and add it to ``found``."""
    word = words.pop(0)
    if not _is_flag(word) or word == "--":
        raise error_at(
            COMMAND_LINE,
            f"'{word}' belongs to no flag",
            remedy="the recipe names the model; flags begin with '--'",
        )
    string, equals, value = word.partition("=")
    if level := re.fullmatch(r"-O([^=.]+)", word):  # -O3
        string, equals, value = "--optimization-level", "=", level[1]
    elif string == "-O":
        string = "--optimization-level"
    string, dot, path = string.partition(".")
    spelled = string.replace("_", "-") if string.startswith("--") else string
    option = table.by_string.get(spelled)
    if option is None or option.name in NOT_FLAGS:
        raise unknown_flag(string if option is None else option.name, table, COMMAND_LINE)
    given = [value] if equals else _values(words, option, single=bool(dot))
    if dot:
        _add_part(found, option, f"{spelled}.{path}", path, given)
        return
    if option.name in found and not option.append:
        raise error_at(COMMAND_LINE, f"flag '{option.name}' is given twice", remedy="give it once")
    try:
        result = convert(option, spelled, _value(option, given))
    except ValueProblem as problem:
        raise value_error(spelled, problem, COMMAND_LINE) from None
    found[option.name] = [*found.get(option.name, ()), *result] if option.append else result  # type: ignore[misc]


def _values(words: list[str], option: Option, *, single: bool) -> list[str]:
    """Take the values of a flag off ``words``."""
    if option.truth is not None and not single:
        return []
    most = len(words) if option.several and not single else 1
    taken: list[str] = []
    while words and len(taken) < most and not _is_flag(words[0]):
        taken.append(words.pop(0))
    return taken


def _value(option: Option, given: list[str]) -> object:
    """Return what the words after a flag stand for. Raises ValueProblem if that is nothing."""
    if option.truth is not None:
        if given:
            raise ValueProblem(repr(given[0]), "no value: it is a switch")
        return True
    if not given:
        if option.bare:
            return True
        raise ValueProblem("nothing", "a value", "a value that begins with '-' needs '='")
    return list(given) if option.several else given[0]


def _add_part(
    found: dict[str, Any], option: Option, flag: str, path: str, given: list[str]
) -> None:
    append = path.endswith("+")
    steps = tuple(path.removesuffix("+").split("."))
    if not option.json or not all(steps):
        raise error_at(COMMAND_LINE, f"flag '{flag}' is no part of a flag that takes JSON")
    if not given:
        raise value_error(flag, ValueProblem("nothing", "a value"), COMMAND_LINE)
    before = found.get(option.name, Parts(()))
    if not isinstance(before, Parts):
        raise error_at(
            COMMAND_LINE, f"flag '{option.name}' is given as a whole and by parts: '{flag}'"
        )
    value = given[0].split(",") if append else _part_value(given[0])
    found[option.name] = Parts((*before.parts, Part(steps, value, append)))


def _part_value(text: str) -> object:
    """Return JSON if it is JSON, a number if it is a size such as 80g, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return size(text)
    except ValueError:
        return text
