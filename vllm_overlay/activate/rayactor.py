"""What Ray's actors are told to import before vLLM: without the plan they end here.

Ray pickles vLLM's worker class by the name of its base, which lies here in the driver. An actor
process looks it up by that name, and comes by this module whatever its environment is.
"""

from __future__ import annotations

import sys
from typing import Any

import vllm_overlay.activate as activate
from vllm_overlay.activate.failure import refuse

# The worker classes that vLLM's executors hand to Ray, and where they lie.
CLASSES = {
    "RayWorkerProc": "vllm.v1.executor.ray_executor_v2",
    "RayWorkerWrapper": "vllm.v1.executor.ray_utils",
}

if not activate.active():
    refuse(
        "a Ray actor was started without the plan",
        expected=f"{activate.PLAN_VARIABLE} in the environment when its process starts",
        found="an unpatched process",
        remedy="let `vllm-overlay serve` start the server: it gives Ray the runtime environment",
    )


def mark(module: Any) -> None:
    """Put a class of this module's name in the place of vLLM's worker class."""
    for name, place in CLASSES.items():
        original = getattr(module, name, None)
        if module.__name__ == place and original is not None:
            marked = type(name, (original,), {"__module__": __name__, "__qualname__": name})
            setattr(module, name, marked)


def __getattr__(name: str) -> Any:
    if name not in CLASSES:
        raise AttributeError(name)
    __import__(CLASSES[name])
    return getattr(sys.modules[CLASSES[name]], name)
