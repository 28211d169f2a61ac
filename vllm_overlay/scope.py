"""What becomes of a file of vLLM's repository that a diff changes: by its path alone."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

LEFT_OUT = {
    "tests": "tests",
    "docs": "docs",
    "examples": "examples",
    "benchmarks": "benchmarks",
    "mkdocs.yaml": "docs",
    "mkdocs.yml": "docs",
    "codecov.yml": "CI",
}
DOCS = {".md", ".rst", ".pyi"}  # nothing runs them, also in vllm/
COMPILED = {".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hip", ".hpp", ".inc", ".inl",
            ".cmake", ".rs"}  # fmt: skip
COMPILED_FOLDERS = {"csrc", "cmake", "rust"}
PACKAGING = re.compile(
    r"setup\.(py|cfg)|pyproject\.toml|MANIFEST\.in|requirements.*|(Cargo|uv|poetry)\.(toml|lock)"
)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def left_out(path: str) -> str | None:
    """Return what a file is that no server runs (tests, docs, CI, examples, benchmarks)."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts:
        return None
    if parts[0] in LEFT_OUT:
        return LEFT_OUT[parts[0]]
    if parts[0].startswith(".") or parts[:2] == ("tools", "pre_commit"):
        return "CI"
    return "docs" if PurePosixPath(path).suffix in DOCS else None


def refusal(path: str) -> str | None:
    """Return why a change of this file cannot be applied while vLLM is imported, or None."""
    pure = PurePosixPath(path)
    parts = pure.parts or ("",)
    if pure.is_absolute() or ".." in parts:
        return "it leads out of vLLM's tree; a path must be as in a/vllm/v1/engine/core.py"
    compiled = pure.suffix in COMPILED or pure.name == "CMakeLists.txt"
    if compiled or parts[0] in COMPILED_FOLDERS:
        return "it is compiled into vLLM, so it cannot be applied at import time"
    if parts[0] != "vllm":
        if any(PACKAGING.fullmatch(part) for part in parts):
            return "packaging takes effect when vLLM is installed, not at import time"
        return "it is no part of what a server imports"
    if pure.suffix != ".py":
        return "it is no Python source, so an import cannot supply it"
    if module_of(path) is None:
        return "a fix cannot change a module of this name"
    return None


def module_of(path: str) -> str | None:
    """Return the module in a Python file: vllm.v1.engine.core of vllm/v1/engine/core.py.

    None for vllm/__init__.py, which no fix may change, and for what cannot be imported by name.
    """
    parts = PurePosixPath(path).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    good = len(parts) > 1 and all(_IDENTIFIER.fullmatch(part) for part in parts)
    return ".".join(parts) if good else None
