"""Recipe rules of a fix: checked before the model loads, minutes before vLLM would notice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_overlay.errors import ConfigError
from vllm_overlay.yamlio import Place, shorten

_ABSENT = object()


@dataclass(frozen=True)
class Need:
    """One rule: the serve flag or environment variable ``key`` is set, or is in a range."""

    kind: str  # "serve" or "env"
    key: str
    present: bool | None
    one_of: tuple[bool | int | str, ...]
    at_least: float | None
    at_most: float | None
    default: bool | int | str | None
    why: str
    place: Place


def check_need(
    name: str, need: Need, serve: Mapping[str, object], env: Mapping[str, str]
) -> ConfigError | None:
    """Return why a recipe's serve flags and environment do not meet a need of the fix ``name``."""
    value = _look_up(serve, need.key) if need.kind == "serve" else env.get(need.key, _ABSENT)
    if value is _ABSENT and need.default is not None:
        value = need.default
    if need.present is False:
        return None if value is _ABSENT else _error(name, need, value, "that it is not set")
    if value is _ABSENT:
        return _error(name, need, value, _wanted(need))
    if need.one_of and _text(value) not in map(_text, need.one_of):
        return _error(name, need, value, _wanted(need))
    if need.at_least is None and need.at_most is None:
        return None
    number = _number(value)
    too_low = need.at_least is not None and (number is None or number < need.at_least)
    too_high = need.at_most is not None and (number is None or number > need.at_most)
    return _error(name, need, value, _wanted(need)) if too_low or too_high else None


def _look_up(serve: Mapping[str, object], key: str) -> object:
    """Return a flag's value, or with ``flag.key`` that of a key of its map."""
    value: object = serve
    for part in key.split("."):
        if not isinstance(value, Mapping) or value.get(part) is None:
            return _ABSENT
        value = value[part]
    return value


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def _wanted(need: Need) -> str:
    parts = []
    if need.one_of:
        parts.append("one of " + ", ".join(map(_text, need.one_of)))
    if need.at_least is not None:
        parts.append(f"at least {need.at_least:g}")
    if need.at_most is not None:
        parts.append(f"at most {need.at_most:g}")
    return " and ".join(parts) or "that it is set"


def _error(name: str, need: Need, value: object, expected: str) -> ConfigError:
    subject = "the serve flag" if need.kind == "serve" else "the environment variable"
    return need.place.error(
        f"the recipe does not meet a need of the fix '{name}': {subject} '{need.key}'",
        found="nothing" if value is _ABSENT else f"'{shorten(_text(value))}'",
        expected=expected,
        remedy=f"because {need.why}",
    )
