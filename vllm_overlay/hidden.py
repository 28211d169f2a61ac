"""Secrets in what a plan would keep: found by a key's name or a URL's form, and never shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from vllm_overlay.errors import CREDENTIALS, ConfigError
from vllm_overlay.flags import Parts, PlaceOf, error_at
from vllm_overlay.recipe_format import looks_secret

SPECIAL_TOKEN = re.compile(r"<.*>|\[.*\]", re.DOTALL)  # such as an hf-overrides' pad_token: <pad>
REMEDY = "set it in the environment, or in a file, of what reads it: a plan is kept and shown"

Path = tuple[str, ...]


def secrets_in(
    values: Mapping[str, object], place: PlaceOf, remedy: str = REMEDY
) -> list[ConfigError]:
    """Return each text, at any depth, whose key names a secret, or that is a URL with a login.

    ``values`` are serve flags, also those of ``parse_extra``. No value is shown.
    """
    return [
        error_at(place(path), f"'{'.'.join(path)}' {why}", remedy=remedy)
        for path, why in dict.fromkeys(_secrets((), values))
    ]


def _secrets(path: Path, value: object) -> Iterator[tuple[Path, str]]:
    if isinstance(value, Parts):
        for part in value.parts:
            yield from _keyed((*path, *part.path), part.value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _keyed((*path, str(key)), inner)
    elif isinstance(value, list):
        for item in value:
            yield from _secrets(path, item)
    elif isinstance(value, str):
        if CREDENTIALS.search(value):
            yield path, "holds a URL with a login in it"
        elif value.lstrip().startswith(("{", "[")):
            yield from _secrets(path, _json(value))


def _keyed(path: Path, value: object) -> Iterator[tuple[Path, str]]:
    if looks_secret(path[-1].replace("-", "_")) and _holds_text(value):
        yield path, "looks like a secret"
    else:
        yield from _secrets(path, value)


def _holds_text(value: object) -> bool:
    """Return whether a value can be a secret: a number, as of ``eos_token_id``, is none."""
    if isinstance(value, list):
        return any(map(_holds_text, value))
    return isinstance(value, str) and not SPECIAL_TOKEN.fullmatch(value) and not value.isdecimal()


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
