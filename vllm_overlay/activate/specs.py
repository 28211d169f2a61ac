"""Specs for the plan's modules: where each must lie, and what will load it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from vllm_overlay.activate.builtin import BUILTIN, Observer
from vllm_overlay.activate.failure import refuse
from vllm_overlay.activate.files import REINSTALL
from vllm_overlay.activate.loader import Loader
from vllm_overlay.activate.state import State


class Specs:
    """Finds the modules of one plan; ``finder`` is the one on ``sys.meta_path``."""

    def __init__(self, state: State, finder: object) -> None:
        self.state = state
        self.modules: dict[str, Mapping[str, Any]] = state.plan["modules"]
        self.names = frozenset(self.modules) | frozenset(BUILTIN)
        self._finder = finder

    def find(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Return a spec whose loader applies the plan, or None for a module that it leaves."""
        if fullname not in self.names:
            return None
        entry = self.modules.get(fullname)
        original = self._original(fullname, path, target)
        if entry is None:
            if original is None:
                return None
            original.loader = Observer(original.loader, original.origin, fullname, self.state)  # type: ignore[assignment]
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
            if finder is self._finder or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                return spec
        return None

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
