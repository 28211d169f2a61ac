"""What the overlay itself changes in a process: vLLM's table of variables, and process titles."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from vllm_overlay.activate.failure import refuse
from vllm_overlay.activate.state import State


def register_variables(module: ModuleType, state: State) -> None:
    """Make the plan's variable and the fixes' flags known to ``vllm.envs``.

    vLLM then neither warns about them nor refuses them, and its compile-cache key counts them:
    the plan by its cache key, since the path would differ between plans that compile alike.
    """
    table = getattr(module, "environment_variables", None)
    if not isinstance(table, dict):
        refuse(
            "vllm.envs has no table of variables",
            module="vllm.envs",
            expected="environment_variables, a dict",
            found=type(table).__name__,
            remedy="use a vLLM that this version of vllm-overlay supports",
        )
    values = {"VLLM_OVERLAY_PLAN": state.plan["cache_key"]}
    for fix in state.plan["fixes"]:
        if fix["flag"]:
            values[fix["flag"]] = fix["value"]
    for name, value in values.items():
        table.setdefault(name, _getter(value))


def _getter(value: Any) -> Callable[[], Any]:
    return lambda: value


def follow_titles(module: ModuleType, state: State) -> None:
    """Rewrite the receipt when the process takes its title: only then is its role known."""
    original = module.setproctitle

    def setproctitle(title: str) -> None:
        original(title)
        state.write()

    module.setproctitle = setproctitle  # type: ignore[attr-defined]


BUILTIN: dict[str, Callable[[ModuleType, State], None]] = {
    "vllm.envs": register_variables,
    "setproctitle": follow_titles,
}


class Observer:
    """Leaves a module as it is, and lets the overlay's own function see it once it has run."""

    def __init__(self, loader: Any, name: str, state: State) -> None:
        self._loader = loader
        self._name = name
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            BUILTIN[self._name](module, self._state)
        except Exception as error:
            refuse("the overlay cannot prepare a module", module=self._name, found=repr(error))
