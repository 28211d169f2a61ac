"""Changes of a definition: those that change what it does, and those that change its looks only."""

from __future__ import annotations

import ast
import copy
import io
import random
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from typing import Any

Mutant = tuple[str, ast.stmt]  # the kind of change, and the changed statement
BLOCKS = ("body", "orelse", "finalbody")


def semantic(statement: ast.stmt, most: int) -> list[Mutant]:
    """Return copies of a statement, each with one change of its meaning, all different.

    At most ``most``, of every kind in turn, from all over the statement.
    """
    places: dict[str, list[tuple[int, Callable[[Any], object]]]] = {}
    for index, node in enumerate(ast.walk(statement)):
        for kind, change in changes(node, statement):
            places.setdefault(kind, []).append((index, change))
    for of_kind in places.values():
        random.Random(0).shuffle(of_kind)
    in_turns = zip_longest(*([(kind, *at) for at in rows] for kind, rows in places.items()))
    found: dict[str, Mutant] = {ast.unparse(statement): ("", statement)}
    for kind, index, change in filter(None, chain.from_iterable(in_turns)):
        if len(found) > most:
            break
        changed = copy.deepcopy(statement)
        change(list(ast.walk(changed))[index])
        found.setdefault(ast.unparse(ast.fix_missing_locations(changed)), (kind, changed))
    return [mutant for mutant in found.values() if mutant[0]]


def changes(node: ast.AST, whole: ast.AST) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Yield what can be changed at a node: a kind, and a function that changes such a node."""
    match node:
        case ast.Constant(value=bool() | None):
            yield "constant", lambda n: setattr(n, "value", not n.value)
        case ast.Constant(value=str()) if not is_docstring(node, whole):
            yield "constant", lambda n: setattr(n, "value", f"{n.value}x")
        case ast.Constant(value=int() | float()):
            yield "constant", lambda n: setattr(n, "value", n.value + 1)
            yield "constant", lambda n: setattr(n, "value", str(n.value))
        case ast.Name():
            yield "name", lambda n: setattr(n, "id", f"{n.id}_")
        case ast.Attribute():
            yield "attribute", lambda n: setattr(n, "attr", f"{n.attr}_")
        case ast.BinOp():
            other = ast.Sub if isinstance(node.op, ast.Add) else ast.Add
            yield "operator", lambda n: setattr(n, "op", other())
            yield "operands", lambda n: swap(n, "left", "right")
        case ast.BoolOp():
            other_ = ast.And if isinstance(node.op, ast.Or) else ast.Or
            yield "operator", lambda n: setattr(n, "op", other_())
            yield "operands", lambda n: n.values.reverse()
            yield "operands", lambda n: n.values.pop()
        case ast.UnaryOp():
            yield "operator", lambda n: setattr(n, "op", ast.Invert())
        case ast.Compare():
            for operator in (ast.Lt, ast.IsNot, ast.NotEq, ast.In):
                if not isinstance(node.ops[0], operator):
                    yield "operator", lambda n, op=operator: n.ops.__setitem__(0, op())
        case ast.IfExp():
            yield "operands", lambda n: swap(n, "body", "orelse")
        case ast.arg():
            yield "argument", lambda n: setattr(n, "arg", f"{n.arg}_")
            yield "annotation", lambda n: setattr(n, "annotation", ast.Name("Mutated"))
        case ast.arguments():
            yield (
                "argument",
                lambda n: n.kwonlyargs.append(ast.arg("added")) or n.kw_defaults.append(None),
            )
            yield "argument", lambda n: setattr(n, "kwarg", ast.arg("others"))
            if node.args and len(node.defaults) < len(node.args):
                yield "default", lambda n: n.defaults.insert(0, ast.Constant(7))
            if node.defaults:
                yield "default", lambda n: n.defaults.__setitem__(-1, ast.Constant("other"))
                yield "default", lambda n: n.defaults.pop(0)
        case ast.keyword():
            yield "argument", lambda n: setattr(n, "arg", f"{n.arg or ''}_")
        case ast.Call():
            yield "call", lambda n: n.args.append(ast.Constant(7))
            yield "call", lambda n: n.keywords.append(ast.keyword("added", ast.Constant(7)))
            yield "call", lambda n: setattr(n, "func", ast.Name("mutated"))
            if node.args:
                yield "call", lambda n: n.args.pop(0)
            if node.keywords:
                yield "call", lambda n: n.keywords.pop()
        case ast.AnnAssign():
            yield "annotation", lambda n: setattr(n, "annotation", ast.Name("Mutated"))
        case ast.Return() | ast.Raise():
            field = "value" if isinstance(node, ast.Return) else "exc"
            yield "result", lambda n: setattr(n, field, ast.Constant("mutated"))
        case ast.If() | ast.While():
            yield "condition", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield "decorator", lambda n: n.decorator_list.insert(0, ast.Name("mutated"))
        yield "name", lambda n: setattr(n, "name", f"{n.name}_")
        if node.decorator_list:
            yield "decorator", lambda n: n.decorator_list.pop()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield "annotation", lambda n: setattr(n, "returns", ast.Name("Mutated"))
    if isinstance(node, ast.ClassDef):
        yield "argument", lambda n: n.bases.append(ast.Name("Mutated"))
        yield "argument", lambda n: n.keywords.append(ast.keyword("added", ast.Constant(7)))
        yield "argument", lambda n: n.bases.clear()
    yield from values(node, whole)
    yield from lines(node)


def values(node: ast.AST, whole: ast.AST) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Yield other values for each expression that a node holds."""
    for name, value in ast.iter_fields(node):
        stored = isinstance(getattr(value, "ctx", ast.Load()), ast.Store | ast.Del)
        if not isinstance(value, ast.expr) or stored or is_docstring(value, whole):
            continue
        if isinstance(node, ast.FormattedValue | ast.Expr) or name == "format_spec":
            continue
        for kind, new in (
            ("operator", lambda x: ast.UnaryOp(ast.Not(), x)),
            ("operator", lambda x: ast.BinOp(x, ast.Add(), ast.Constant(1))),
            ("call", lambda x: ast.Call(ast.Name("mutated"), [x], [])),
            ("constant", lambda x: ast.Constant("mutated")),
        ):
            yield kind, lambda n, name=name, new=new: setattr(n, name, new(getattr(n, name)))


def lines(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Yield changes of the lines inside a node: one deleted, one added, two swapped."""
    for block in BLOCKS:
        body = getattr(node, block, None)
        if not isinstance(body, list):
            continue
        for index, line in enumerate(body):
            if isinstance(line, ast.Pass) or is_docstring(getattr(line, "value", None), node):
                continue
            put: Any = lambda n, new, b=block, i=index: getattr(n, b).__setitem__(i, new)  # noqa: E731
            yield "deleted line", lambda n, p=put: p(n, ast.Pass())
            add: Any = lambda n, b=block, i=index: getattr(n, b).insert(i, call("mutated"))  # noqa: E731
            yield "added line", add
            guard: Any = lambda n, b=block, i=index: getattr(n, b).__setitem__(  # noqa: E731
                i, ast.If(ast.Name("mutated"), [getattr(n, b)[i]], [])
            )
            yield "condition", guard
            if index and not is_docstring(getattr(body[index - 1], "value", None), node):
                back: Any = lambda n, b=block, i=index: getattr(n, b).insert(  # noqa: E731
                    i - 1, getattr(n, b).pop(i)
                )
                yield "swapped lines", back


def call(name: str) -> ast.Expr:
    return ast.Expr(ast.Call(ast.Name(name), [], []))


def swap(node: Any, one: str, other: str) -> None:
    first, second = getattr(node, one), getattr(node, other)
    setattr(node, one, second)
    setattr(node, other, first)


def is_docstring(value: ast.AST | None, whole: ast.AST) -> bool:
    """Return whether a constant is a bare string, which does nothing."""
    return isinstance(value, ast.Constant) and any(
        isinstance(node, ast.Expr) and node.value is value and isinstance(value.value, str)
        for node in ast.walk(whole)
    )


# --- of looks only ---


def replaced(source: str, statement: ast.stmt, text: str) -> str:
    """Return the source with a statement's lines, decorators included, replaced."""
    rows = source.splitlines(keepends=True)
    first, last = span(statement)
    new = textwrap.indent(textwrap.dedent(text), " " * statement.col_offset).rstrip() + "\n"
    return "".join([*rows[: first - 1], new, *rows[last:]])


def span(statement: ast.stmt) -> tuple[int, int]:
    """Return the first and last line of a statement, from 1."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)]), statement.end_lineno or 0


def text_of(source: str, statement: ast.stmt) -> str:
    first, last = span(statement)
    return "".join(source.splitlines(keepends=True)[first - 1 : last])


def cosmetic(source: str, statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield sources that differ from ``source`` only in how a statement looks, or where it is."""
    text = text_of(source, statement)
    yield "comment above", replaced(source, statement, f"# mutated\n{textwrap.dedent(text)}")
    yield "comments behind", replaced(source, statement, with_comments(text))
    yield "one line each", replaced(source, statement, ast.unparse(statement))
    yield "wrapped", replaced(source, statement, wrapped(textwrap.dedent(text)))
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield "docstring", replaced(source, statement, with_docstring(statement))
        yield "without docstring", replaced(source, statement, with_docstring(statement, None))
        yield "moved", moved(source, statement)
    yield "blank lines", replaced(source, statement, f"\n\n\n{textwrap.dedent(text)}\n\n")
    yield "module docstring", f'"""Mutated."""\n{source}' if "__future__" not in source else source


def with_comments(text: str) -> str:
    """Put a comment at the end of each line that ends a statement."""
    ends = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(textwrap.dedent(text)).readline)
        if token.type == tokenize.NEWLINE
    }
    rows = textwrap.dedent(text).split("\n")
    return "\n".join(f"{row}  # {n}" if n in ends else row for n, row in enumerate(rows, 1))


def wrapped(text: str) -> str:
    """Break the line behind each bracket and comma in brackets, as black does with long ones."""
    depth, rows = 0, text.splitlines(keepends=True)
    breaks: list[tuple[int, int]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.OP:
            continue
        depth += (token.string in "([{") - (token.string in ")]}")
        if depth and token.string in "([{,":
            breaks.append(token.end)
    for row, column in reversed(breaks):
        line = rows[row - 1]
        rows[row - 1] = f"{line[:column]}\n        {line[column:].lstrip(' ')}"
    return "".join(rows)


def with_docstring(statement: ast.stmt, text: str | None = "Mutated.\n\nOn lines.") -> str:
    changed: Any = copy.deepcopy(statement)
    first = changed.body[0]
    if isinstance(first, ast.Expr) and is_docstring(first.value, changed):
        changed.body.pop(0)
    if text is not None:
        changed.body.insert(0, ast.Expr(ast.Constant(text)))
    return ast.unparse(ast.fix_missing_locations(changed))


def moved(source: str, statement: ast.stmt) -> str:
    """Move the definition at the top of the module that a statement is in to the module's end."""
    for top in ast.parse(source).body:
        if span(top)[0] <= span(statement)[0] and span(statement)[1] <= span(top)[1]:
            rows = source.splitlines(keepends=True)
            first, last = span(top)
            rest = [*rows[: first - 1], *rows[last:]]
            return "".join([*rest, "\n\n", *rows[first - 1 : last]])
    raise LookupError(ast.unparse(statement))
