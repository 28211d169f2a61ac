"""The source text of symbols, and how it differs between two vLLM trees."""

from __future__ import annotations

import difflib

from vllm_overlay.symbols import MODULE, definitions
from vllm_overlay.upstream import Tree


def symbol_lines(tree: Tree, module: str, symbol: str) -> list[str] | None:
    """Return the lines that define a symbol, decorators included; None if there is none.

    Raises ConfigError if the module does not parse.
    """
    source = tree.source(module)
    if source is None:
        return None
    text = source.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    if symbol == MODULE:
        return lines
    found: list[str] = []
    for node in definitions(source, module).get(symbol, []):
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        found += lines[first - 1 : node.end_lineno]
    return found or None


def since_review(
    old: Tree, new: Tree, module: str, symbol: str, recorded: str
) -> tuple[tuple[str, ...], str | None]:
    """Return the diff of a symbol from ``old``, the release whose digest was ``recorded``, to
    ``new``; without one, also why there is none.

    Raises ConfigError if a module does not parse.
    """
    if old.symbols(module).get(symbol) != recorded:
        return (), f"vLLM {old.version} as released has another digest, too"
    lines = tuple(difference(old, new, module, symbol))
    why = "the text is the same; the conditions that it stands under are not"
    return lines, None if lines else why


def difference(old: Tree, new: Tree, module: str, symbol: str) -> list[str]:
    """Return a unified diff of a symbol's source in two trees; empty if they are the same text.

    Raises ConfigError if a module does not parse.
    """
    before, after = (symbol_lines(tree, module, symbol) or [] for tree in (old, new))
    names = (f"vLLM {old.version} {symbol}", f"vLLM {new.version} {symbol}")
    return list(difflib.unified_diff(before, after, *names, lineterm=""))
