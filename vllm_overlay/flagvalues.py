"""One serve flag: what it takes, and a value of it as the recipe, the plan and vLLM write it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_overlay.errors import did_you_mean

LISTED_CHOICES = 12


class ValueProblem(Exception):
    """A value that a flag cannot take."""

    def __init__(self, found: object, expected: str, remedy: str | None = None) -> None:
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"found {found}; expected {expected}")


@dataclass(frozen=True)
class Option:
    """One option of vLLM's serve parser, as ``parserdump.py`` tells it."""

    name: str  # its long name, without dashes before it
    strings: tuple[str, ...]
    truth: Mapping[str, bool] | None  # of a switch: what each spelling sets
    nargs: str | int | None
    bare: bool  # may stand without its value, which is then True
    append: bool  # given several times, once for each value
    type: str  # int, float, str, json, json-or-str, size, size-or-auto, any, other
    choices: tuple[object, ...] | None
    fields: Mapping[str, object] | None  # the keys of a JSON flag, where vLLM takes no others

    @property
    def several(self) -> bool:
        return self.nargs in ("+", "*") or isinstance(self.nargs, int)

    @property
    def json(self) -> bool:
        return self.type in ("json", "json-or-str")

    def spelling(self, value: bool) -> str | None:
        """Return what sets a switch to ``value``, or None if nothing does."""
        spellings = [string for string, sets in (self.truth or {}).items() if sets is value]
        plain = f"--{self.name}" if value else f"--no-{self.name}"
        return plain if plain in spellings else spellings[0] if spellings else None

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Option:
        """Raises KeyError, TypeError or ValueError if ``data`` is no option of the dump."""
        strings = _as_list(data["strings"])
        long = [string for string in strings if string.startswith("--")]
        usual = "--" + str(data["dest"]).replace("_", "-")
        choices = data["choices"]
        truth, fields = data["truth"], data["fields"]
        nargs = data["nargs"]
        return cls(
            name=(usual if usual in long else long[0])[2:],
            strings=tuple(strings),
            truth=dict(truth) if isinstance(truth, dict) else None,
            nargs=nargs if isinstance(nargs, str | int) else None,
            bare=bool(data["bare"]),
            append=bool(data["append"]),
            type=str(data["type"]),
            choices=None if choices is None else tuple(_as_list(choices)),
            fields=fields if isinstance(fields, dict) else None,
        )


def _as_list(value: object) -> list[str]:
    if not isinstance(value, list) or not value:
        raise TypeError("not a list")
    return value


def convert(option: Option, string: str, value: object) -> object:
    """Return ``value``, written for the spelling ``string``, in canonical form.

    Raises ValueProblem if vLLM's parser would not take it.
    """
    if option.truth is not None:
        if not isinstance(value, bool):
            raise ValueProblem(_shown(value), "true or false")
        return option.truth[string] is value
    if value is None:
        raise ValueProblem("nothing", "a value", "remove the flag, or give it a value")
    if option.bare and value is True:
        return True
    if option.several or option.append:
        items = value if isinstance(value, list) else [value]
        if isinstance(option.nargs, int) and len(items) != option.nargs:
            raise ValueProblem(f"{len(items)} values", f"{option.nargs} values")
        if not items and option.nargs != "*":
            raise ValueProblem("an empty list", "at least one value")
        if len(items) > 1 and option.several:
            _refuse_dashes(items)
        return [_one(option, item) for item in items]
    return _one(option, value)


def _refuse_dashes(items: list[object]) -> None:
    # argparse would take the second or later of these for a flag.
    for item in items:
        if to_text(item).startswith("-") and not re.fullmatch(r"-\d+", to_text(item)):
            raise ValueProblem(_shown(item), "a value that does not begin with '-'")


def _one(option: Option, value: object) -> object:
    result = _CONVERTERS[option.type](value)
    # Converters of vLLM's own may map other spellings to a choice; vLLM judges those.
    if option.choices is None or option.type == "other":
        return result
    if str(result) not in {str(choice) for choice in option.choices}:
        names = [str(choice) for choice in option.choices if choice is not None]
        listed = ", ".join(names) if len(names) <= LISTED_CHOICES else f"one of {len(names)} values"
        raise ValueProblem(_shown(value), listed, did_you_mean(str(result), names))
    return result


def _whole(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip()):
        return int(value)
    raise ValueProblem(_shown(value), "a whole number")


def _number(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    try:
        return float(value) if isinstance(value, str) else float("")
    except ValueError:
        raise ValueProblem(_shown(value), "a number") from None


def _text(value: object) -> object:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    # 1.10 has become 1.1 and yes has become true by now.
    quote = "write it in quotes" if isinstance(value, float | bool) else None
    raise ValueProblem(_shown(value), "text", quote)


def _plain(value: object) -> object:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, list | dict):  # such as an item of lora-modules, which may be JSON
        return value
    raise ValueProblem(_shown(value), "text or a number")


def _size(value: object) -> object:
    if isinstance(value, str):
        try:
            size(value)
        except ValueError:
            raise ValueProblem(_shown(value), "a whole number such as 4096, 32k or 1M") from None
        return int(value) if value.isdecimal() else value
    return _whole(value)


def _size_or_auto(value: object) -> object:
    return value if value in ("auto", "-1") else _size(value)


def _json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueProblem(_shown(value), "a mapping, or JSON text") from None


def _json_or_text(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(r"(?s)\s*\{.*\}\s*", value):
        return _json(value)
    return value if isinstance(value, dict) else _text(value)


_CONVERTERS: Mapping[str, Callable[[object], object]] = {
    "int": _whole,
    "float": _number,
    "str": _text,
    "any": _plain,
    "other": _plain,
    "size": _size,
    "size-or-auto": _size_or_auto,
    "json": _json,
    "json-or-str": _json_or_text,
}


def size(text: str) -> int:
    """Return a number as vLLM writes sizes: ``1k`` is 1000, ``1K`` is 1024, and so on to t and T.

    Raises ValueError for anything else. As ``human_readable_int`` in vllm/utils/argparse_utils.py.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if not match:
        return int(text)
    number, unit = match.groups()
    power = "kmgt".index(unit.lower()) + 1
    return int(float(number) * 1000**power) if unit.islower() else int(number) * 1024**power


def to_text(value: object) -> str:
    """Return a value as one argument of a command line."""
    if isinstance(value, dict | list | bool) or value is None:
        return json.dumps(value)
    return str(value)


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else to_text(value)
