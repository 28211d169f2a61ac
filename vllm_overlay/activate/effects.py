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
