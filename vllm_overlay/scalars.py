"""What an unquoted scalar of a YAML file means, if all readers agree on it."""

from __future__ import annotations

import math
import re

import yaml
import yaml.resolver

Scalar = str | int | float | bool | None

_INT = re.compile(r"[-+]?[0-9]+")
_OTHER_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}
_YAML_1_1 = yaml.resolver.Resolver()
_TAG = "tag:yaml.org,2002:"


def read_scalar(text: str) -> tuple[Scalar, tuple[str, str] | None]:
    """Return an unquoted scalar's value, and the problem and remedy if it has no clear one.

    It has a clear one when YAML 1.1 (PyYAML, vLLM's ``--config``) and the core schema of YAML 1.2
    (most editors) agree on it.
    """
    tag: str = _YAML_1_1.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    old = tag.removeprefix(_TAG)
    kind, value = _read_1_2(text)
    if kind == "out-of-range":
        return text, ("this number is out of range", "quote it if it is text")
    octal = kind == "int" and re.match(r"[-+]?0[0-9]", text)
    if old == kind and not octal:
        return value, None
    if old == "merge":  # refused as a key; as a value it is text to YAML 1.2
        return text, None
    write = "true or false" if old == "bool" else "a plain decimal number"
    remedy = "quote it" if old in ("timestamp", "value") else f"write {write}, or quote it as text"
    return text, ("YAML readers disagree on what this is", remedy)


def _read_1_2(text: str) -> tuple[str, Scalar]:
    """Return the kind and the value of an unquoted scalar in the core schema of YAML 1.2."""
    if text in _WORDS:
        return ("null" if _WORDS[text] is None else "bool"), _WORDS[text]
    if _INT.fullmatch(text) or _OTHER_INT.fullmatch(text):
        if len(text) > 20:
            return "out-of-range", None
        number = int(text) if _INT.fullmatch(text) else int(text, 0)
        return ("int", number) if -(2**63) <= number < 2**63 else ("out-of-range", None)
    if _NOT_FINITE.fullmatch(text):
        return "out-of-range", None
    if _FLOAT.fullmatch(text):
        real = float(text)
        return ("float", real) if math.isfinite(real) else ("out-of-range", None)
    return "str", text
