"""The symbols of a Python source and their digests.

A digest is that of our own serialization of the parsed source, so that every Python gives the
same one: empty fields are left out (each Python adds some), and so are positions, comments,
docstrings and type comments. A symbol that is defined several times, say in both branches of an
``if``, has one digest over all its definitions and the conditions that they stand under.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_overlay.errors import ConfigError

MODULE = "<module>"  # the symbol that stands for the whole module
DIGEST_FORM = 1  # raise it when the serialization changes: recorded digests are void then
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)  # what lists of statements are made of
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)
_COMPOUND = (*_SCOPES, ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try,
             ast.TryStar, ast.Match, ast.excepthandler, ast.match_case, ast.mod)  # fmt: skip


@dataclass(frozen=True)
class Symbols:
    """Digests by dotted name: ``whole`` covers all that is inside a symbol, ``own`` leaves out
    the symbols inside it, so that a changed method changes its class's ``whole`` only."""

    whole: dict[str, str]
    own: dict[str, str]


def read_symbols(source: bytes, name: str) -> Symbols:
    """Return the symbols of a module's source. Raises ConfigError if it does not parse."""
    try:
        with _no_collection():
            return _Reader().read(parse(source, name))
    except RecursionError:
        raise ConfigError("the source is nested too deeply", file=name) from None


def definitions(source: bytes, name: str) -> dict[str, list[ast.stmt]]:
    """Return the statements that define each symbol. Raises ConfigError if it does not parse."""
    reader = _Reader()
    try:
        reader.read(parse(source, name))
    except RecursionError:
        raise ConfigError("the source is nested too deeply", file=name) from None
    return reader.nodes


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from looking for cycles: a parsed source has none, and it takes three quarters
    of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def parse(source: bytes, name: str) -> ast.Module:
    """Return the parsed source. Raises ConfigError if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in upstream's strings
            return ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(
            f"the source does not parse: {error.msg}", file=name, line=error.lineno
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"the source does not parse: {error}", file=name) from None


def overlap(one: str, other: str) -> bool:
    """Return whether two symbols are the same code: equal, or one inside the other."""
    if MODULE in (one, other) or one == other:
        return True
    return one.startswith(f"{other}.") or other.startswith(f"{one}.")


@dataclass
class _Text:
    """A serialization under way: with the symbols inside, and without."""

    whole: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.whole.append(text)
        self.own.append(text)


class _Reader:
    """Walks one module. ``scope`` are the definitions around, ``guards`` the statements (such as
    an ``if``) between the innermost of them and the walk, each with the field it is in."""

    def __init__(self) -> None:
        self.whole: dict[str, list[str]] = defaultdict(list)
        self.own: dict[str, list[str]] = defaultdict(list)
        self.nodes: dict[str, list[ast.stmt]] = defaultdict(list)
        self.scope: list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef] = []
        self.guards: list[tuple[ast.AST, str]] = []

    def read(self, module: ast.Module) -> Symbols:
        text = _Text()
        self._node(module, text)
        whole = {name: _digest(parts) for name, parts in self.whole.items()}
        own = {name: _digest(parts) for name, parts in self.own.items()}
        return Symbols(
            {MODULE: _digest(text.whole)} | whole,
            {MODULE: _digest(text.own)} | own,
        )

    def _node(self, node: ast.AST, text: _Text) -> None:
        if not isinstance(node, _COMPOUND):
            text.add(_plain(node))
            return
        text.add(f"({type(node).__name__}")
        for name, value in _fields(node):
            text.add(f" {name}=")
            if not isinstance(value, list):
                self._value(value, text)
            elif isinstance(value[0], _BLOCKS) and not isinstance(node, (*_SCOPES, ast.Module)):
                self.guards.append((node, name))
                self._list(value, text)
                self.guards.pop()
            else:
                self._list(value, text)
        text.add(")")

    def _list(self, values: list[object], text: _Text) -> None:
        text.add("[")
        for value in values:
            before = len(text.own)
            self._value(value, text)
            text.whole.append(",")
            text.own += [","] * (len(text.own) > before)
        text.add("]")

    def _value(self, value: object, text: _Text) -> None:
        if not isinstance(value, ast.AST):
            text.add(_atom(value))
        elif isinstance(value, ast.stmt) and (names := self._defined(value)):
            self._definition(value, names, text)
        else:
            self._node(value, text)

    def _defined(self, node: ast.stmt) -> list[str]:
        """Return the names that a statement defines in its scope; none for a function's locals."""
        if isinstance(node, _SCOPES):
            return [node.name]
        if self.scope and isinstance(self.scope[-1], _FUNCTIONS):
            return []
        if isinstance(node, ast.Assign):
            return list(dict.fromkeys(n for target in node.targets for n in _targets(target)))
        if isinstance(node, ast.AnnAssign | ast.AugAssign):
            return list(_targets(node.target))
        if type(node).__name__ == "TypeAlias":  # since Python 3.12
            return list(_targets(node.name))  # type: ignore[attr-defined]
        return []

    def _definition(self, node: ast.stmt, names: list[str], text: _Text) -> None:
        guard = "".join(_guard(*guard) for guard in self.guards)
        prefix = ".".join(scope.name for scope in self.scope)
        inner = _Text([guard], [guard])
        if isinstance(node, _SCOPES):
            self.scope.append(node)
            guards, self.guards = self.guards, []
            self._node(node, inner)
            self.guards = guards
            self.scope.pop()
        else:
            self._node(node, inner)
        whole, own = _digest(inner.whole), _digest(inner.own)
        for name in names:
            dotted = f"{prefix}.{name}" if prefix else name
            self.whole[dotted].append(whole)
            self.own[dotted].append(own)
            self.nodes[dotted].append(node)
        text.whole.append(whole)


def _plain(value: Any) -> str:
    """Return the text of a constant, identifier or node that no symbol is defined inside of."""
    if not isinstance(value, ast.AST):
        return _atom(value)
    if isinstance(value, ast.Constant):
        return _atom(value.value)
    text = "(" + type(value).__name__
    for name, item in _fields(value):
        if type(item) is list:
            text += f" {name}=[{''.join([_plain(each) + ',' for each in item])}]"
        else:
            text += f" {name}={_plain(item)}"
    return text + ")"


def _fields(node: ast.AST) -> list[tuple[str, Any]]:
    """Return the fields that count, without those that are empty on any Python."""
    found = []
    for name in _field_names(type(node)):  # type: ignore[arg-type]  # a class is hashable
        value = getattr(node, name, None)
        if type(value) is list:
            if isinstance(node, ast.JoinedStr):
                value = _merged(value)
            elif isinstance(node, ast.Delete):
                if len(value) == 1 and isinstance(value[0], ast.Tuple):
                    value = value[0].elts  # `del (a, b)` is `del a, b`
            elif value and isinstance(value[0], ast.stmt):
                value = [item for item in value if not _is_nothing(item)]
        elif name == "format_spec" and isinstance(value, ast.JoinedStr) and not _fields(value):
            continue
        if value:
            found.append((name, value))
    return found


@functools.cache
def _field_names(kind: type[ast.AST]) -> tuple[str, ...]:
    return tuple(name for name in kind._fields if name != "ctx")  # ctx: where the node stands


def _is_nothing(item: object) -> bool:
    """Return whether a statement does nothing: a docstring or other bare string, or `pass`."""
    if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
        return isinstance(item.value.value, str)
    return isinstance(item, ast.Pass)


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """Join an f-string's neighbouring literals and drop empty ones: Python 3.12 splits others."""
    merged: list[ast.expr] = []
    literal = ""
    for value in [*values, None]:
        if isinstance(value, ast.Constant):
            literal += str(value.value)
            continue
        if literal:
            merged.append(ast.Constant(literal))
            literal = ""
        if value is not None:
            merged.append(value)
    return merged


def _targets(target: ast.expr) -> Iterator[str]:
    """Yield the names that an assignment's target binds or writes into."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for item in target.elts:
            yield from _targets(item)
    elif isinstance(target, ast.Starred | ast.Attribute | ast.Subscript):
        yield from _targets(target.value)


def _guard(node: ast.AST, field_name: str) -> str:
    """Return the condition that a block stands under: its statement without any block."""
    text = ""
    for name, value in _fields(node):
        if not isinstance(value, list):
            text += _plain(value)
        elif not isinstance(value[0], _BLOCKS):
            text += f"[{''.join([_plain(item) + ',' for item in value])}]"
        text += f" {name}"
    return f"<{type(node).__name__}.{field_name} {text}>"


def _atom(value: object) -> str:
    """Return a constant or identifier in ASCII, whatever Python's own Unicode tables."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"int:{value:x}"  # no limit on digits
    return f"{type(value).__name__}:{value!a}"


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()
