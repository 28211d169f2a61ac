"""Upstream changes under a fix: what changes the meaning is refused, what changes looks is not.

A fix's edit is text, so a change of looks inside the lines of a hunk keeps the hunk from matching;
there, the reviewed symbols must still be found to be what they were.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mutants import cosmetic, replaced, semantic
from tests.upstream.conftest import release
from vllm_overlay.fix import Fix, load_fixes
from vllm_overlay.symbols import MODULE, definitions
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import judge, order

FIXES = Path(__file__).resolve().parents[2] / "fixes"
LEAST, MOST = 20, 48  # mutations of a symbol
RELIED_ON = 3  # symbols of a fix and a release, beside those of the modules that it changes


def reviewed() -> Iterator[tuple[str, str, str, str]]:
    """Each fix's symbols in the modules that it changes, and a few of those that it relies on."""
    for name, fix in load_fixes(FIXES).items():
        for version, modules in fix.reviewed.items():
            rows = [(name, version, module, s) for module, each in modules.items() for s in each]
            changed = [row for row in rows if row[2] in {*fix.edits, *fix.hooks}]
            others = [row for row in rows if row not in changed]
            yield from changed
            yield from others[:: max(1, len(others) // RELIED_ON)][:RELIED_ON]


class Ground:
    """The modules of one release that a fix looks at, copied to be changed; one of them is."""

    def __init__(self, name: str, version: str, module: str, folder: Path) -> None:
        known = load_fixes(FIXES)
        self.fixes = order([known[name], *ancestors(known[name], known)])
        original, self.name, self.module = release(version), name, module
        for each in {m for fix in self.fixes for m in [*fix.reviewed[version], *fix.edits]}:
            path = original.path(each)
            assert path is not None, each
            copy = folder / path.relative_to(original.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
        for fix in self.fixes:  # a new module needs its package
            for each in fix.modules:
                if each.rpartition(".")[0] in fix.modules:
                    continue  # which the fix brings itself
                place = folder.joinpath(*each.split(".")[:-1], "__init__.py")
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
        self.tree = Tree(folder, original.version, cache=folder / "cache")
        path = self.tree.path(module)
        assert path is not None
        self.path, self.source = path, path.read_text()

    def statement(self, symbol: str) -> ast.stmt:
        return definitions(self.source.encode(), self.module)[symbol][0]

    def verdict(self, source: str) -> tuple[str, tuple[str, ...]]:
        """Return the fix's verdict with ``source`` as the module, and the reasons."""
        self.path.write_text(source)
        judged = judge(self.fixes, self.tree)[-1]
        assert judged.fix.name == self.name
        return judged.verdict, judged.reasons


def ancestors(fix: Fix, known: dict[str, Fix]) -> list[Fix]:
    found = [known[name] for name in fix.after if name in known]
    return [*found, *(other for each in found for other in ancestors(each, known))]


@pytest.fixture(params=list(reviewed()), ids=lambda row: "-".join(row[i] for i in (0, 1, 3)))
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Ground, str]:
    name, version, module, symbol = request.param
    if symbol == MODULE:
        pytest.skip("the whole module is reviewed: any of its symbols stands for it")
    return Ground(name, version, module, tmp_path), symbol


def test_every_change_of_meaning_is_refused(ground: tuple[Ground, str]) -> None:
    place, symbol = ground
    assert place.verdict(place.source)[0] == "apply"
    statement = place.statement(symbol)
    mutants = semantic(statement, MOST)
    assert len(mutants) >= LEAST
    assert len({kind for kind, _ in mutants}) >= 4
    for kind, mutant in mutants:
        changed = ast.unparse(mutant)
        verdict, reasons = place.verdict(replaced(place.source, statement, changed))
        assert verdict == "incompatible", (kind, changed)
        named = (f"{place.module}: {symbol} is not", f"{place.module}: {symbol} does not exist")
        assert any(reason.startswith(named) for reason in reasons), (kind, changed, reasons)


def test_no_change_of_looks_matters(ground: tuple[Ground, str]) -> None:
    place, symbol = ground
    bindings = definitions(place.source.encode(), place.module)[symbol]
    variants = [
        (kind, source)
        for kind, source in cosmetic(place.source, bindings[0])
        if kind != "moved" or len(bindings) == 1  # the last binding of a name is the one in force
    ]
    accepted = 0
    for kind, source in variants:
        verdict, reasons = place.verdict(source)
        accepted += verdict == "apply"
        assert all(" does not match " in reason for reason in reasons), (kind, reasons, source)
    edited = [fix for fix in place.fixes if place.module in fix.edits]
    assert accepted == len(variants) or (edited and accepted >= 2)
