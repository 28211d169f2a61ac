"""Loads the modules of fixes/kimi-k3-deferred-recoverssm into vLLM's namespace, without a plan.

For kernels' tests and measurements alone: in Triton's interpreter, or on a GPU. The vLLM beside it
must be the release that the fix is for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import yaml

import tests.support.interpreter  # noqa: F401 (before vLLM)

FIX = Path(__file__).resolve().parents[2] / "fixes" / "kimi-k3-deferred-recoverssm"


def load_fix() -> dict[str, ModuleType]:
    """Import the fix's new modules; return them by the last part of their names."""
    manifest = yaml.safe_load((FIX / "fix.yaml").read_text())
    loaded = {}
    for name, file in manifest["modules"].items():
        if name not in sys.modules:
            _load(name, FIX / file)
        loaded[name.rpartition(".")[2]] = sys.modules[name]
    return loaded


def _load(name: str, file: Path) -> None:
    parent, _, last = name.rpartition(".")
    package = [] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=package)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    setattr(importlib.import_module(parent), last, module)
