"""Digests of real source: the same on every Python, blind to looks, awake to meaning."""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pythons import pythons
from vllm_overlay.fix import load_fixes
from vllm_overlay.symbols import MODULE, read_symbols
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import judge

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = 40  # every so manieth file
PER_SYMBOL = 20  # mutations


def sample(tree: Tree) -> list[Path]:
    return sorted((tree.root / "vllm").rglob("*.py"))[::SAMPLE]


@pytest.mark.parametrize("python", pythons(), ids=str)
def test_every_python_gives_the_same(python: Path, new_release: Tree) -> None:
    code = """if True:
        import json, sys
        from vllm_overlay.symbols import read_symbols
        for line in sys.stdin:
            with open(line.strip(), "rb") as file:
                print(json.dumps(read_symbols(file.read(), "m").whole))
    """
    files = sample(new_release)
    out = subprocess.run(
        [python, "-c", code], input="\n".join(map(str, files)), text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
    ).stdout.splitlines()  # fmt: skip
    assert len(out) == len(files) > 50
    for file, line in zip(files, out, strict=True):
        assert json.loads(line) == read_symbols(file.read_bytes(), "m").whole, file


def test_reformatted_source_has_the_same_digests(new_release: Tree) -> None:
    for file in sample(new_release):
        source = file.read_bytes()
        written_anew = ast.unparse(ast.parse(source)).encode()
        assert read_symbols(written_anew, "m").whole == read_symbols(source, "m").whole, file


# --- mutations of what the fixes were reviewed against ---


def mutations(node: ast.AST) -> Iterator[ast.AST]:
    """Yield copies of a definition, each with one change of its meaning."""
    for index, part in enumerate(ast.walk(node)):
        changed = copy.deepcopy(node)
        found = list(ast.walk(changed))[index]
        if isinstance(part, ast.Constant) and isinstance(part.value, int | float | str):
            parent = {child: p for p in ast.walk(changed) for child in ast.iter_child_nodes(p)}
            if isinstance(parent.get(found), ast.Expr):
                continue  # a docstring
            found.value = f"{part.value}x" if isinstance(part.value, str) else part.value + 1
        elif isinstance(part, ast.BinOp):
            found.op = ast.Mod() if not isinstance(part.op, ast.Mod) else ast.Add()
        elif isinstance(part, ast.BoolOp):
            found.op = ast.And() if isinstance(part.op, ast.Or) else ast.Or()
        elif isinstance(part, ast.Compare):
            found.ops[0] = ast.IsNot() if not isinstance(part.ops[0], ast.IsNot) else ast.Is()
        elif isinstance(part, ast.arg | ast.keyword):
            found.arg = f"{part.arg}_"
        elif isinstance(part, ast.Name):
            found.id = f"{part.id}_"
        elif isinstance(part, ast.Attribute):
            found.attr = f"{part.attr}_"
        elif isinstance(part, ast.Call) and part.args:
            del found.args[0]
        elif isinstance(part, ast.If | ast.With | ast.For):
            found.body = [ast.Pass()]
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            found.decorator_list.append(ast.Name("mutated"))
        elif isinstance(part, ast.Return):
            found.value = ast.Constant("mutated")
        else:
            continue
        yield changed


def find(tree: ast.Module, symbol: str) -> tuple[list[ast.stmt], int]:
    """Return the list of statements that a symbol stands in, and where."""
    body: list[ast.stmt] = tree.body
    *outer, last = symbol.split(".")
    for name in outer:
        body = next(n for n in body if getattr(n, "name", "") == name).body  # type: ignore[attr-defined]
    for index, node in enumerate(body):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if last in [getattr(node, "name", ""), *(getattr(t, "id", "") for t in targets)]:
            return body, index
    raise LookupError(symbol)


def reviewed() -> list[tuple[str, str, str]]:
    return [
        (name, module, symbol)
        for name, fix in load_fixes(ROOT / "fixes").items()
        for module, symbols in fix.reviewed.get("0.32.0", {}).items()
        for symbol in symbols
        if symbol != MODULE
    ]


@pytest.mark.parametrize(("name", "module", "symbol"), reviewed())
def test_every_mutation_of_a_reviewed_symbol_is_refused(
    name: str, module: str, symbol: str, old_release: Tree, tmp_path: Path
) -> None:
    fix = load_fixes(ROOT / "fixes")[name]
    modules = {*fix.reviewed["0.32.0"], *fix.edits, *fix.hooks}
    for each in modules:
        path = old_release.path(each)
        assert path is not None
        copied = tmp_path / path.relative_to(old_release.root)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(path.read_bytes())
    tree = Tree(tmp_path, "0.32.0", cache=tmp_path / "cache")
    assert judge([fix], tree)[0].verdict == "apply"
    target = tree.path(module)
    source = tree.source(module)
    assert target is not None
    assert source is not None
    body, index = find(ast.parse(source), symbol)
    all_of_them = list(mutations(body[index]))
    chosen = random.Random(symbol).sample(all_of_them, min(PER_SYMBOL, len(all_of_them)))
    for mutated in chosen:
        parsed = ast.parse(source)
        body, index = find(parsed, symbol)
        body[index] = mutated  # type: ignore[assignment]
        target.write_text(ast.unparse(ast.fix_missing_locations(parsed)))
        judged = judge([fix], tree)[0]
        assert judged.verdict == "incompatible", ast.unparse(mutated)
        assert any(f"{module}: {symbol} " in reason for reason in judged.reasons)
