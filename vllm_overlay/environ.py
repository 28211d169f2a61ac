"""Environment variables that begin with ``VLLM_``: which ones there are, and those that are not.

vLLM only warns of a name that it does not know, so a misspelt switch does nothing, unseen.
"""

from __future__ import annotations

import ast
import mmap
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from vllm_overlay import infocache
from vllm_overlay.errors import ConfigError, nearest
from vllm_overlay.flags import Place, error_at
from vllm_overlay.upstream import Tree

SCAN_FORM = 1  # raise it when the scan finds other names in the same tree
PREFIX = "VLLM_"
OWN_NAMES = frozenset(
    f"VLLM_OVERLAY_{name}" for name in ("PLAN", "HOME", "RECIPES", "FIXES", "MODELS")
)
NAME = re.compile(r"VLLM_[A-Z0-9_]+")
# What Kubernetes sets in every pod for a Service of the same namespace, and Docker for a link.
SERVICE = re.compile(
    r"(VLLM(?:_[A-Z0-9]+)*?)_(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?"
    r"|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)"
)
SERVICE_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://")


class EnvironmentPlace:
    """The place of a variable that is set in the process's environment."""

    file = "environment"
    line = None
    column = None


def known_env(tree: Tree, home: Path) -> frozenset[str]:
    """Return the names that this vLLM knows or reads, found without importing it.

    These are the keys of ``environment_variables`` in vllm/envs.py and the names that any module
    or compiled library of the tree reads by itself. Seconds the first time, then cached.
    """
    key = infocache.key(str(SCAN_FORM), tree.version, infocache.tree_identity(tree.root))
    file = home / "info" / f"environ-{key}.json"
    kept = infocache.load(file)
    if isinstance(kept, list) and kept and all(isinstance(name, str) for name in kept):
        return frozenset(kept)
    names = _registered(tree)
    for path in (tree.root / "vllm").rglob("*.py"):
        names |= _names_read(path.read_bytes())
    for path in (tree.root / "vllm").rglob("*.so"):
        names |= _names_in_library(path)
    infocache.save(file, sorted(names))
    return frozenset(names)


def _registered(tree: Tree) -> set[str]:
    source = tree.source("vllm.envs")
    names = set(_registry_keys(ast.parse(source))) if source else set()
    if not names:
        raise ConfigError(
            "vLLM's environment variables cannot be found",
            file=tree.root / "vllm" / "envs.py",
            expected="a dictionary 'environment_variables'",
        )
    return names


def _registry_keys(module: ast.Module) -> Iterator[str]:
    """Yield the names in ``environment_variables = {...}`` and ``environment_variables[...] =``."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if _is_registry(target) and isinstance(node.value, ast.Dict):
                    yield from _names(node.value.keys)
                elif isinstance(target, ast.Subscript) and _is_registry(target.value):
                    yield from _names([target.slice])
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("update", "setdefault")
            and _is_registry(node.func.value)
        ):
            for argument in node.args:
                yield from _names(argument.keys if isinstance(argument, ast.Dict) else [argument])


def _is_registry(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "environment_variables"


def _names(nodes: Collection[ast.expr | None]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and NAME.fullmatch(str(node.value)):
            yield str(node.value)


def _names_read(source: bytes) -> set[str]:
    """Return the names that a module reads from the environment by a literal or a constant."""
    if PREFIX.encode() not in source or b"env" not in source:
        return set()
    try:
        module = ast.parse(source)
    except SyntaxError:  # a template among the package's files
        return set()
    constants = {
        target.id: node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    asked: list[ast.expr | None] = []
    for node in ast.walk(module):
        if isinstance(node, ast.Subscript) and _is_environ(node.value):
            asked.append(node.slice)
        elif isinstance(node, ast.Compare) and any(map(_is_environ, node.comparators)):
            asked.append(node.left)
        elif isinstance(node, ast.Call) and _reads(node.func):
            asked += node.args[:1]
    resolved = [
        constants.get(node.id, node) if isinstance(node, ast.Name) else node for node in asked
    ]
    return set(_names(resolved))


def _is_environ(node: ast.expr) -> bool:
    return "environ" in (getattr(node, "attr", None), getattr(node, "id", None))


def _reads(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        method = function.attr in ("get", "setdefault", "pop") and _is_environ(function.value)
        return method or function.attr == "getenv"
    return isinstance(function, ast.Name) and function.id == "getenv"


def _names_in_library(path: Path) -> set[str]:
    """Return the names among the C strings of a compiled library."""
    if not path.stat().st_size:
        return set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        found = re.findall(rb"\0(VLLM_[A-Z0-9_]+)(?=\0)", text)
    return {name.decode() for name in found}


def check_env(
    environ: Mapping[str, str],
    known: Collection[str],
    flags: Collection[str],
    place: Callable[[str], Place] | None = None,
) -> list[ConfigError]:
    """Return every variable ``VLLM_…`` that neither vLLM, nor a fix, nor this program knows.

    ``known`` is of ``known_env``, ``flags`` are the names of the fixes' flags, and ``place`` tells
    where a recipe sets a variable (without it, they come from the process's environment). Values
    are not shown: any of them may be a secret.
    """
    everything = {*known, *flags, *OWN_NAMES}
    errors: list[ConfigError] = []
    services: dict[str, list[str]] = {}
    for name in sorted(environ):
        service = _service(name, environ, everything) if place is None else None
        if service:
            services.setdefault(service, []).append(name)
        elif name.startswith(PREFIX) and name not in everything:
            where = place(name) if place else EnvironmentPlace()
            # Without the prefix: all names would be alike with it.
            near = nearest(name.removeprefix(PREFIX), [k.removeprefix(PREFIX) for k in everything])
            remedy = f"did you mean '{PREFIX}{near}'?" if near else "unset it"
            what = f"environment variable {name} is known to neither vLLM nor a fix"
            errors.append(error_at(where, what, remedy=remedy))
    return errors + [_service_error(*item) for item in services.items()]


def _service(name: str, environ: Mapping[str, str], known: Collection[str]) -> str | None:
    """Return the name of the Service that Kubernetes set this variable for, if it did."""
    match = SERVICE.fullmatch(name)
    if match is None:
        return None
    base = match[1]
    addressed = SERVICE_ADDRESS.match(environ.get(f"{base}_PORT", "")) is not None
    if not (addressed or f"{base}_SERVICE_HOST" in environ):
        return None
    if name in known and not SERVICE_ADDRESS.match(environ[name]):
        return None
    return base.lower().replace("_", "-")


def _service_error(service: str, names: list[str]) -> ConfigError:
    more = len(names) - 1
    which = f"s {names[0]} and {more} more come" if more else f" {names[0]} comes"
    return error_at(
        EnvironmentPlace(),
        f"environment variable{which} from a Kubernetes Service or a container link named "
        f"'{service}', and vLLM would take such a name for its own",
        remedy="set enableServiceLinks: false in the pod, or name the Service differently",
    )
