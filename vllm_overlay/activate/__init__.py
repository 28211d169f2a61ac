"""Applies a plan inside vLLM's processes. Standard library only: every Python process pays for it.

``vllm_overlay.pth`` calls :func:`start` while the interpreter starts, only if a plan is set.
Whatever goes wrong from there on ends the process: a patch that is missing must never serve.
"""

from __future__ import annotations

import os
import sys

from vllm_overlay.activate import failure
from vllm_overlay.activate.failure import refuse

TYPE_CHECKING = False  # importing typing costs more than the rest of the start
if TYPE_CHECKING:
    from vllm_overlay.activate.state import State

PLAN_VARIABLE = "VLLM_OVERLAY_PLAN"

_state: State | None = None


def active() -> bool:
    """Whether a plan is applied in this process."""
    return _state is not None


def current() -> State | None:
    """Return what this process has of its plan; None where no plan is applied."""
    return _state


def start() -> None:
    """Read the plan named in the environment and put its finder first on ``sys.meta_path``.

    Idempotent for one plan. A second plan, a plan that cannot be read, or a process that has
    imported vLLM already ends with exit status 78.
    """
    global _state
    path = os.environ[PLAN_VARIABLE]
    if _state is not None:
        if _state.path == path:
            return
        refuse(
            "a second plan appeared in this process",
            found=path,
            expected=_state.path,
            remedy="start one process per plan",
        )
    imported = next((name for name in sys.modules if name.split(".", 1)[0] == "vllm"), None)
    if imported is not None:
        refuse(
            "vLLM was imported before the plan",
            module=imported,
            found="an unpatched vLLM in this process",
            expected=f"{PLAN_VARIABLE} in the environment when Python starts",
            remedy="pass the plan's variable to the process that starts this one",
        )
    from vllm_overlay.activate.finder import Finder
    from vllm_overlay.activate.planfile import read_plan
    from vllm_overlay.activate.state import State

    if not os.access(path, os.R_OK):
        from vllm_overlay.activate.family import tell_by_environment

        failure.on_failure.append(tell_by_environment)
    state = State(path, read_plan(path))
    failure.on_failure.append(state.record_failure)
    os.register_at_fork(after_in_child=state.after_fork)
    if state.is_main():
        from vllm_overlay.activate.family import lead

        lead(state)
    sys.meta_path.insert(0, Finder(state))
    _state = state
