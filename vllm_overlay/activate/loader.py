"""The loader that runs the plan's source of a module, and its hooks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn

from vllm_overlay.activate.builtin import BUILTIN, before_vllm
from vllm_overlay.activate.failure import refuse
from vllm_overlay.activate.files import check, place_of, read
from vllm_overlay.activate.hooks import run_hooks
from vllm_overlay.activate.state import State


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
        """Return the code of the patched source: runpy asks for it for ``python -m``.

        Whoever asks runs the code itself, where no hook follows: with hooks, the process ends.
        """
        if self._hooks:
            refuse(
                "a module with a hook cannot run as `python -m`",
                fix=self._hooks[0]["fix"],
                module=fullname,
                remedy="leave the fix out of the recipe, or write it as an edit",
            )
        if sys._getframe(1).f_globals.get("__name__") == "runpy":
            self._state.mark(*self._pairs())
        return self._compile()

    def exec_module(self, module: ModuleType) -> None:
        """Run the module and its hooks; whatever is raised on the way ends the process."""
        if self.name == "vllm":
            before_vllm(self._original, self._state)
        try:
            exec(self._compile(), module.__dict__)
            if self.name in BUILTIN:
                BUILTIN[self.name](module, self._state)
            run_hooks(self._hooks, module)
            self._state.mark(*self._pairs())
        except (KeyboardInterrupt, SystemExit) as error:
            # vLLM's signal handlers raise these, in the main thread; in another one they would
            # end the thread and nothing else.
            if threading.current_thread() is threading.main_thread():
                raise
            self._failed(error)
        except BaseException as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> NoReturn:
        refuse(
            "a module of the plan raised an exception while it was imported",
            fix=self._entry["fixes"][0]["fix"],
            module=self.name,
            found=f"{type(error).__name__}: {error}{place_of(error)}",
            remedy="mend the fix or what the module imports, or leave the fix out of the recipe",
        )

    def get_resource_reader(self, name: str | None = None) -> Any:
        """Resources of a package stay beside the original file."""
        if self._original is None:
            return super().get_resource_reader(name)
        return SourceFileLoader(self.name, self._original).get_resource_reader(self.name)

    def _pairs(self) -> list[tuple[str, str]]:
        return [(item["fix"], self.name) for item in self._entry["fixes"]]

    def _compile(self) -> CodeType:
        fix = self._entry["fixes"][0]["fix"]
        if self._original is not None:
            text = read(self._original, fix, self.name)
            check(text, self._entry["original"], self._original, fix, self.name)
        source = self._entry["source"]
        if source is not None:
            text = read(self.path, fix, self.name)
            check(text, source["sha256"], self.path, fix, self.name)
        return compile(text, self.path, "exec", dont_inherit=True)
