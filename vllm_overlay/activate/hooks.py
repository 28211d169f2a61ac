"""Calls the hooks of a module, and looks whether each did what it says."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from vllm_overlay.activate.effects import Before, unmet
from vllm_overlay.activate.failure import refuse
from vllm_overlay.activate.files import check, place_of, read

MEND = "mend the fix, or leave it out of the recipe"

_files: dict[str, ModuleType] = {}  # the modules of hook files, by path
_lock = threading.RLock()
_put: dict[tuple[str, str], object] = {}  # what hooks have put where, for a reload


def run_hooks(hooks: Sequence[Mapping[str, Any]], module: ModuleType) -> None:
    """Call each hook with the module; end the process if one fails or has no effect.

    A hook that replaces what an earlier one put there must declare `after`. When all have run,
    every effect is read back once more.
    """
    effects: dict[str, tuple[Mapping[str, Any], object]] = {}
    for hook in hooks:
        before = Before(module)
        changes = _call(hook, module)
        reason = unmet(module, changes) or _taken(effects, hook, changes)
        for name, value in changes.items() if reason is None else ():
            reason = reason or _unchanged(before, module, name, value)
            reason = reason or _held_elsewhere(before.value(name), module, value)
            effects[name] = (hook, value)
            _put[module.__name__, name] = value
        _refuse_if(reason, hook, module)
    for name, (hook, value) in effects.items():
        _refuse_if(unmet(module, {name: value}), hook, module)


def _call(hook: Mapping[str, Any], module: ModuleType) -> Mapping[str, object]:
    try:
        function: Callable[[ModuleType], Any] = getattr(_load(hook, module), hook["function"])
        changes: Mapping[str, object] = function(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and CancelledError too: callers swallow them
        found = f"{type(error).__name__}: {error}{place_of(error)}"
        named = {"fix": hook["fix"], "module": module.__name__}
        refuse("a hook raised an exception", found=found, remedy=MEND, **named)
    return changes


def _load(hook: Mapping[str, Any], target: ModuleType) -> ModuleType:
    path = hook["file"]
    with _lock:
        if path not in _files:
            data = read(path, hook["fix"], target.__name__)
            check(data, hook["sha256"], path, hook["fix"], target.__name__)
            stem = os.path.basename(path).removesuffix(".py")
            module = ModuleType(f"vllm_overlay_fix.{hook['fix']}.{stem}")
            module.__file__ = path
            exec(compile(data, path, "exec", dont_inherit=True), module.__dict__)
            _files[path] = sys.modules[module.__name__] = module
        return _files[path]


def _taken(
    effects: Mapping[str, tuple[Mapping[str, Any], object]],
    hook: Mapping[str, Any],
    changes: Mapping[str, object],
) -> str | None:
    for name in changes:
        owner = effects[name][0]["fix"] if name in effects else hook["fix"]
        if owner not in (hook["fix"], *hook["after"]):
            return f"{name} is what the fix {owner} put there, which it does not name in `after`"
    return None


def _unchanged(before: Before, module: ModuleType, name: str, value: object) -> str | None:
    old = before.value(name)
    if old is not value or old is _put.get((module.__name__, name)):
        return None
    return f"{name} is what it was before the hook"


def _held_elsewhere(old: object, module: ModuleType, value: object) -> str | None:
    """Return who imported by name what a hook has replaced since: they still use the old one."""
    if old is value or not isinstance(old, FunctionType | type):
        return None
    for name, other in list(sys.modules.items()):
        if name.partition(".")[0] != "vllm" or other is module:
            continue
        for attribute, held in list(getattr(other, "__dict__", {}).items()):
            if held is old:
                return f"{name}.{attribute} holds what it replaced, bound before it ran"
    return None


def _refuse_if(reason: str | None, hook: Mapping[str, Any], module: ModuleType) -> None:
    if reason is not None:
        named = {"fix": hook["fix"], "module": module.__name__}
        refuse("a hook had no effect", found=reason, remedy=MEND, **named)
