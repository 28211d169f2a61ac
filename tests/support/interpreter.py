"""Lets vLLM's CUDA modules be imported and interpreted on a machine without a GPU.

Import it before vLLM. On a GPU it does nothing.
"""

from __future__ import annotations

import os
import sys
from types import FunctionType, ModuleType

import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if torch.version.cuda is None:  # torchvision's CUDA build cannot load its library, which has these
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def rebind() -> None:
    """Make module-level aliases of Triton's functions, ``exp = tl.exp``, interpretable.

    The interpreter replaces functions in ``triton.language``; an alias keeps the compiler's.
    """
    if not INTERPRETING:
        return
    import triton.language as tl

    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and isinstance(module, ModuleType):
            for alias, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and tl.core.is_builtin(value):
                    _rebind(module, alias, value)


def _rebind(module: ModuleType, alias: str, value: FunctionType) -> None:
    import triton.language as tl

    name = value.__name__
    owners = [owner for owner in (tl, tl.math, tl.core) if getattr(owner, name, None) is value]
    if owners:
        setattr(module, alias, lambda *a, _owner=owners[0], **k: getattr(_owner, name)(*a, **k))
