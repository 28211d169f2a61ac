"""The loader that runs the plan's source of a module, and its hooks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from vllm_overlay.activate.builtin import BUILTIN
from vllm_overlay.activate.effects import unmet
from vllm_overlay.activate.failure import refuse
from vllm_overlay.activate.planfile import sha256
from vllm_overlay.activate.state import State

REINSTALL = "restart with `vllm-overlay serve`, which resolves the recipe anew"


class Loader(SourceFileLoader):
    """Runs the plan's source of one module, then the hooks on it.

    ``path`` is the patched file in the store, the file of an added module, or the original one
    where only hooks apply. Code is compiled from bytes whose digest the plan names and never
    read from a ``.pyc``, which could hold anything.
    """

    def __init__(
        self,
        fullname: str,
        path: str,
        state: State,
        entry: Mapping[str, Any],
        original: str | None,
    ) -> None:
        super().__init__(fullname, path)
        self._state = state
        self._entry = entry
        self._original = original
        self._hooks = [item for item in entry["fixes"] if item["kind"] == "hook"]

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the patched source, as runpy (``python -m``) asks for it.

        A hook cannot run there: runpy executes the code itself. Such a process ends.
        """
        if sys._getframe(1).f_globals.get("__name__") == "runpy":
            if self._hooks:
                refuse(
                    "a module with a hook cannot run as `python -m`",
                    fix=self._hooks[0]["fix"],
                    module=fullname,
                    remedy="leave the fix out of the recipe, or write it as an edit",
                )
            self._mark_source()
        return self._compile()

    def exec_module(self, module: ModuleType) -> None:
        """Run the module and its hooks; whatever is raised on the way ends the process."""
        try:
            exec(self._compile(), module.__dict__)
        except Exception as error:
            refuse(
                "a patched module raised an exception while it was imported",
                fix=self._entry["fixes"][0]["fix"],
                module=self.name,
                found=f"{type(error).__name__}: {error}{_place(error)}",
                remedy="mend the fix, or leave it out of the recipe",
            )
        if self.name in BUILTIN:
            BUILTIN[self.name](module, self._state)
        self._mark_source()
        for hook in self._hooks:
            run_hook(hook, module)
            self._state.mark((hook["fix"], self.name))

    def get_resource_reader(self, name: str | None = None) -> Any:
        """Resources of a package stay beside the original file."""
        if self._original is None:
            return super().get_resource_reader(name)
        return SourceFileLoader(self.name, self._original).get_resource_reader(self.name)

    def _mark_source(self) -> None:
        changed = [item["fix"] for item in self._entry["fixes"] if item["kind"] != "hook"]
        if changed:
            self._state.mark(*((fix, self.name) for fix in changed))

    def _compile(self) -> CodeType:
        if self._original is not None:
            original = read(self._original, self._entry, self.name)
            check(original, self._entry["original"], self._original, self._entry, self.name)
        source = self._entry["source"]
        if source is None:
            text = original
        else:
            text = read(self.path, self._entry, self.name)
            check(text, source["sha256"], self.path, self._entry, self.name)
        return compile(text, self.path, "exec", dont_inherit=True)


def read(path: str, entry: Mapping[str, Any], module: str) -> bytes:
    """Return a file's bytes; a file that cannot be read ends the process."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        refuse(
            "a source of the plan cannot be read",
            fix=entry["fixes"][0]["fix"],
            module=module,
            expected=path,
            found=error,
            remedy=REINSTALL,
        )


def check(data: bytes, digest: str, path: str, entry: Mapping[str, Any], module: str) -> None:
    """End the process if a file is not the one that the plan was resolved against."""
    found = sha256(data)
    if found != digest:
        refuse(
            f"{path} changed since the plan was made",
            fix=entry["fixes"][0]["fix"],
            module=module,
            expected=f"sha256 {digest[:16]}",
            found=f"sha256 {found[:16]}",
            remedy=REINSTALL,
        )


_hook_files: dict[str, ModuleType] = {}


def run_hook(hook: Mapping[str, Any], module: ModuleType) -> None:
    """Call a fix's hook with the module, and read back that its changes are there."""
    named: dict[str, Any] = {"fix": hook["fix"], "module": module.__name__}
    remedy = "mend the fix, or leave it out of the recipe"
    try:
        function: Callable[[ModuleType], object] = getattr(
            _hook_module(hook, module.__name__), hook["function"]
        )
        reason = unmet(module, function(module))
    except Exception as error:
        found = f"{type(error).__name__}: {error}{_place(error)}"
        refuse("a hook raised an exception", found=found, remedy=remedy, **named)
    if reason is not None:
        refuse("a hook had no effect", found=reason, remedy=remedy, **named)


def _hook_module(hook: Mapping[str, Any], target: str) -> ModuleType:
    path = hook["file"]
    if path not in _hook_files:
        entry = {"fixes": [hook]}
        data = read(path, entry, target)
        check(data, hook["sha256"], path, entry, target)
        name = f"vllm_overlay_fix.{hook['fix']}.{os.path.basename(path).removesuffix('.py')}"
        module = ModuleType(name)
        module.__file__ = path
        exec(compile(data, path, "exec", dont_inherit=True), module.__dict__)
        _hook_files[path] = sys.modules[name] = module
    return _hook_files[path]


def _place(error: BaseException) -> str:
    """Return where an exception was raised, as ` at file:line`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
