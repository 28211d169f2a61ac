"""What the overlay itself changes in a process: vLLM's table of variables, and process titles."""

from __future__ import annotations

import os
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


def leave_alone(module: ModuleType, state: State) -> None:
    """vLLM's own package: watched for its first import alone."""


def compare_nodes(module: ModuleType, state: State) -> None:
    """Let no rank of several nodes join before it is compared with the head's."""
    if state.plan.get("nodes"):
        from vllm_overlay.activate.gate import guard

        guard(module, state)


def mark_actors(module: ModuleType, state: State) -> None:
    """Let no Ray actor work without the plan."""
    from vllm_overlay.activate.rayactor import mark

    mark(module)


BUILTIN: dict[str, Callable[[ModuleType, State], None]] = {
    "vllm": leave_alone,
    "vllm.envs": register_variables,
    "vllm.distributed.parallel_state": compare_nodes,
    "vllm.v1.executor.ray_executor_v2": mark_actors,
    "vllm.v1.executor.ray_utils": mark_actors,
    "setproctitle": follow_titles,
}


def before_vllm(origin: str | None, state: State) -> None:
    """Check, before vLLM's package runs, that it is the plan's; from now on a receipt is owed."""
    expected = f"{state.plan['vllm']['path']}/__init__.py"
    if origin is None or os.path.realpath(origin) != os.path.realpath(expected):
        refuse(
            "this is another vLLM than the plan's",
            module="vllm",
            expected=expected,
            found=origin or "a vllm folder without source",
            remedy="unset PYTHONPATH, or remove the folder that shadows the installed vLLM",
        )
    state.first_import()


class Observer:
    """Leaves a module as it is, and lets the overlay's own function see it once it has run."""

    def __init__(self, loader: Any, origin: str | None, name: str, state: State) -> None:
        self._loader = loader
        self._origin = origin
        self._name = name
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if self._name == "vllm":
            before_vllm(self._origin, self._state)
        self._loader.exec_module(module)
        try:
            BUILTIN[self._name](module, self._state)
        except Exception as error:
            refuse("the overlay cannot prepare a module", module=self._name, found=repr(error))
