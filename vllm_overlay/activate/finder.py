"""The finder: the gate between the import system and the plan."""

from __future__ import annotations

import sys

from vllm_overlay.activate.failure import refuse

TYPE_CHECKING = False  # importing typing costs more than the rest of the start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from vllm_overlay.activate.specs import Specs
    from vllm_overlay.activate.state import State


class Finder:
    """First on ``sys.meta_path``; knows the plan's modules and leaves every other alone.

    What a process needs that never imports vLLM is here; the rest is loaded at its first import.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._specs: Specs | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader applies the plan, or None for a module that it leaves."""
        if fullname.partition(".")[0] not in ("vllm", "setproctitle"):
            return None
        try:
            if sys.meta_path[0] is not self:
                self._return_to_front()
            if self._specs is None:
                from vllm_overlay.activate.specs import Specs

                self._specs = Specs(self._state, self)
            return self._specs.find(fullname, path, target)
        except Exception as error:
            refuse("the overlay cannot find a module", module=fullname, found=repr(error))

    def _return_to_front(self) -> None:
        """vLLM puts finders of its own first; behind one, the plan could be passed by."""
        sys.meta_path[:] = [self, *(item for item in sys.meta_path if item is not self)]
