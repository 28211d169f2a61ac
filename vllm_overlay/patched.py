"""The modules of a plan: what activation needs to know of each, and the files of the store."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_overlay.activate.planfile import sha256
from vllm_overlay.fix import Fix
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import Judged


@dataclass
class Modules:
    """``entries`` is the plan's ``modules``; the rest is what the store must hold.

    ``sources`` are patched texts and ``links`` are symbolic links, both by their path relative
    to the state folder.
    """

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, Path] = field(default_factory=dict)


def plan_modules(judged: Sequence[Judged], tree: Tree) -> Modules:
    """Return the modules that the applied fixes change.

    A patched text lies under the digest of the original and of itself, never of the plan:
    torch.compile and vLLM hash a source's path, and plans that patch alike must share caches.
    """
    modules = Modules()
    texts: dict[str, bytes] = {}
    for item in judged:
        if item.verdict != "apply":
            continue
        after = _predecessors(item.fix, {other.fix.name: other.fix for other in judged})
        for name, file in item.fix.modules.items():
            entry = _entry(modules.entries, name, tree, added=file)
            entry["source"] = {"file": str(file), "sha256": sha256(file.read_bytes())}
            entry["fixes"].append(_step(item.fix, "module", file, after))
        for name, file in item.fix.edits.items():
            entry = _entry(modules.entries, name, tree)
            entry["fixes"].append(_step(item.fix, "edit", file, after))
            texts[name] = item.patched[name]  # the last edit's text has the earlier ones in it
        for name, hook in item.fix.hooks.items():
            entry = _entry(modules.entries, name, tree)
            entry["fixes"].append(_step(item.fix, "hook", hook.file, after, hook.function))
    for name, text in texts.items():
        _store(modules, modules.entries[name], text, tree)
    return modules


def _store(modules: Modules, entry: dict[str, Any], text: bytes, tree: Tree) -> None:
    parts = [entry["original"], sha256(text)]
    # A package's place is looked at from elsewhere too: Path(vllm.__file__).parent.
    neighbours = (
        _neighbours(tree.root, entry["path"]) if entry["package"] or _uses_file(text) else {}
    )
    if neighbours:
        parts.append(str(tree.root))  # the links lead there
    folder = f"store/{sha256(chr(10).join(parts).encode())}"
    path = f"{folder}/{entry['path']}"
    entry["source"] = {"file": path, "sha256": sha256(text)}
    modules.sources[path] = text
    modules.links |= {f"{folder}/{name}": target for name, target in neighbours.items()}


def _uses_file(text: bytes) -> bool:
    """Whether a module looks at its own place, and so for files beside it."""
    return b"__file__" in text and any(
        isinstance(node, ast.Name) and node.id == "__file__" for node in ast.walk(ast.parse(text))
    )


def _neighbours(root: Path, path: str) -> Mapping[str, Path]:
    """Return what lies beside a file of vLLM and beside each folder above it, by relative path."""
    parts = Path(path).parts
    found = {}
    for depth in range(1, len(parts)):
        folder = Path(*parts[:depth])
        for item in (root / folder).iterdir():
            if item.name not in (parts[depth], "__pycache__"):
                found[str(folder / item.name)] = item
    return found


def _predecessors(fix: Fix, known: Mapping[str, Fix]) -> list[str]:
    """Return the fixes that this one may build upon: those of `after`, and theirs."""
    found: set[str] = set()
    left = list(fix.after)
    while left:
        name = left.pop()
        if name not in found and name in known:
            found.add(name)
            left += known[name].after
    return sorted(found)


def _entry(
    entries: dict[str, dict[str, Any]], name: str, tree: Tree, added: Path | None = None
) -> dict[str, Any]:
    if name not in entries:
        path = None if added else tree.path(name)
        file = added or path
        entries[name] = {
            "path": str(path.relative_to(tree.root)) if path else None,
            "original": sha256(path.read_bytes()) if path else None,
            "package": file is not None and file.name == "__init__.py",
            "source": None,
            "fixes": [],
        }
    return entries[name]


def _step(
    fix: Fix, kind: str, file: Path, after: Sequence[str], function: str | None = None
) -> dict[str, Any]:
    digest = sha256(file.read_bytes())
    return {
        "fix": fix.name,
        "kind": kind,
        "file": str(file),
        "sha256": digest,
        "function": function,
        "after": after,
    }
