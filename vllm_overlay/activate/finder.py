"""The finder and loader that give vLLM's modules to the import system with the plan applied."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType
from typing import Any

from vllm_overlay.activate.builtin import BUILTIN
from vllm_overlay.activate.effects import unmet
from vllm_overlay.activate.failure import refuse
from vllm_overlay.activate.state import State, sha256

REINSTALL = "restart with `vllm-overlay serve`, which resolves the recipe anew"


class Finder:
    """First on ``sys.meta_path``; knows the plan's modules and leaves every other alone."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.modules: dict[str, Mapping[str, Any]] = state.plan["modules"]
        self.names = frozenset(self.modules) | frozenset(BUILTIN) | {"vllm"}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader applies the plan, or None for a module that it leaves."""
        if fullname not in self.names:
            return None
        try:
            return self._find(fullname, path, target)
        except Exception as error:
            refuse("the overlay cannot find a module", module=fullname, found=repr(error))

    def _find(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        entry = self.modules.get(fullname)
        original = self._original(fullname, path, target)
        if fullname == "vllm":
            self._check_place(original)
            self.state.first_import()
        if entry is None:
            if original is None or fullname not in BUILTIN:
                return None
            original.loader = Observer(original.loader, fullname, self.state)  # type: ignore[assignment]
            return original
        if entry["original"] is None:
            return self._added(fullname, entry, original)
        return self._changed(fullname, entry, original)

    def _original(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Ask the finders behind this one."""
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def _check_place(self, original: ModuleSpec | None) -> None:
        """vLLM must be the one that the plan was resolved against, not one that shadows it."""
        expected = f"{self.state.plan['vllm']['path']}/__init__.py"
        found = original.origin if original else None
        if found is None or os.path.realpath(found) != os.path.realpath(expected):
            refuse(
                "this is another vLLM than the plan's",
                module="vllm",
                expected=expected,
                found=found or "no vllm package that has source",
                remedy="unset PYTHONPATH, or remove the folder that shadows the installed vLLM",
            )

    def _added(
        self, fullname: str, entry: Mapping[str, Any], original: ModuleSpec | None
    ) -> ModuleSpec | None:
        if original is not None:
            refuse(
                "this vLLM has a module that the fix adds",
                fix=entry["fixes"][0]["fix"],
                module=fullname,
                expected="no such module in vLLM",
                found=original.origin,
                remedy=REINSTALL,
            )
        file = entry["source"]["file"]
        loader = Loader(fullname, file, self.state, entry, None)
        spec = spec_from_file_location(fullname, file, loader=loader)
        if spec is not None:
            # The fix's folder is no package: only what the plan names can be imported from it.
            spec.submodule_search_locations = [] if entry["package"] else None
        return spec

    def _changed(
        self, fullname: str, entry: Mapping[str, Any], original: ModuleSpec | None
    ) -> ModuleSpec | None:
        expected = os.path.join(os.path.dirname(self.state.plan["vllm"]["path"]), entry["path"])
        found = original.origin if original else None
        if (
            original is None
            or found is None
            or os.path.realpath(found) != os.path.realpath(expected)
        ):
            refuse(
                "a module of the plan is not where it was",
                fix=entry["fixes"][0]["fix"],
                module=fullname,
                expected=expected,
                found=found or "no such module",
                remedy=REINSTALL,
            )
        source = entry["source"]
        file = os.path.join(self.state.home, source["file"]) if source else found
        loader = Loader(fullname, file, self.state, entry, found)
        return spec_from_file_location(
            fullname,
            file,
            loader=loader,
            submodule_search_locations=original.submodule_search_locations,
        )


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
