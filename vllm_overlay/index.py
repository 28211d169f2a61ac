"""All symbols of a vLLM tree at once: where a piece of code has gone that is not in its place."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from vllm_overlay import infocache
from vllm_overlay.errors import ConfigError
from vllm_overlay.symbols import DIGEST_FORM, MODULE, read_symbols
from vllm_overlay.upstream import Tree

CHUNK = 64  # files that a worker process takes at a time

Index = dict[str, dict[str, str]]  # module: symbol: digest


def index(tree: Tree) -> Index:
    """Return the digest of every symbol of every module that parses.

    Seconds the first time (on all cores), then cached until a file of the tree changes.
    """
    file = None
    if tree.cache is not None:
        key = infocache.key(str(DIGEST_FORM), infocache.tree_identity(tree.root))
        file = tree.cache / f"index-{key}.json"
        kept = infocache.load(file)
        if isinstance(kept, dict) and kept:
            return kept
    found = _read_all(tree.root, sorted((tree.root / "vllm").rglob("*.py")))
    if file is not None:
        infocache.save(file, found)
    return found


def moved(tree: Tree, digest: str, module: str) -> list[tuple[str, str]]:
    """Return the modules other than ``module`` that have this very code, each with its name."""
    return [
        (other, symbol)
        for other, symbols in index(tree).items()
        if other != module
        for symbol, found in symbols.items()
        if found == digest and symbol != MODULE
    ]


def _read_all(root: Path, files: Sequence[Path]) -> Index:
    chunks = [files[at : at + CHUNK] for at in range(0, len(files), CHUNK)]
    read = functools.partial(_read, root)
    workers = min(len(os.sched_getaffinity(0)), len(chunks))
    if workers > 1:
        try:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(workers, mp_context=context) as pool:
                return {name: found for part in pool.map(read, chunks) for name, found in part}
        except (BrokenProcessPool, OSError):
            pass  # no worker can start here, say in a container without shared memory
    return {name: found for chunk in chunks for name, found in read(chunk)}


def _read(root: Path, files: Sequence[Path]) -> list[tuple[str, dict[str, str]]]:
    found = []
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        try:
            found.append((module, read_symbols(file.read_bytes(), module).whole))
        except (ConfigError, OSError):  # a template among the package's files
            continue
    return found
