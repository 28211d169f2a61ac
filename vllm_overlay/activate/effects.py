"""Reads back what a hook says it changed: a hook that changed nothing is refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any


def unmet(module: ModuleType, changes: object) -> str | None:
    """Return why ``changes`` is not what ``module`` holds now, or None if every change is there.

    ``changes`` maps dotted attributes (``"Class.method"``) to the objects that the hook put
    there; each is looked up again without descriptors and must be that very object.
    """
    if not isinstance(changes, Mapping) or not changes:
        return f"the hook returned {changes!r} instead of a mapping of attributes that it set"
    for name, expected in changes.items():
        try:
            found = _static(module, str(name))
        except (AttributeError, KeyError):
            return f"{name} does not exist after the hook"
        if not _same(found, expected):
            return f"{name} is {found!r} and not the hook's {expected!r}"
    return None


def _static(module: ModuleType, dotted: str) -> Any:
    """Walk to a dotted name; ``["key"]`` is not needed: a mapping's entry is ``name.key``."""
    found: Any = module
    for part in dotted.split("."):
        found = found[part] if isinstance(found, dict) else inspect.getattr_static(found, part)
    return found


def _same(found: Any, expected: Any) -> bool:
    if found is expected:
        return True
    # A function put into a class as a class or static method is found in its wrapper.
    return isinstance(expected, FunctionType) and getattr(found, "__func__", None) is expected


class Before:
    """What a module held before a hook: its names, and those of its classes and dicts."""

    def __init__(self, module: ModuleType) -> None:
        self._names = dict(vars(module))
        self._inner = {
            name: dict(value if isinstance(value, dict) else vars(value))
            for name, value in self._names.items()
            if isinstance(value, dict | type)
        }

    def value(self, dotted: str) -> object:
        """Return what stood under a dotted name; for what was not there, a new object."""
        name, _, rest = dotted.partition(".")
        if not rest:
            return self._names.get(name, object())
        return self._inner.get(name, {}).get(rest, object())
