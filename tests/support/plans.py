"""Writes the plan of a folder of fixes on the installed vLLM, without a recipe or a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from vllm_overlay.fix import load_fixes
from vllm_overlay.patched import plan_modules
from vllm_overlay.plan import Plan, PlannedFix, fill_store, write_plan
from vllm_overlay.resolve import fix_digest
from vllm_overlay.upstream import Tree, installed_tree
from vllm_overlay.verdict import judge, order


def write_fixes_plan(
    fixes: Path,
    home: Path,
    *,
    tree: Tree | None = None,
    names: Collection[str] | None = None,
    values: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Plan the fixes of a folder, all of which must apply, and return the plan's path.

    ``tree`` is the installed vLLM unless given; ``names`` are all of the folder's. ``values`` of
    the flags by fix; the others have their defaults.
    """
    tree = tree or installed_tree()
    chosen = [fix for fix in load_fixes(fixes).values() if names is None or fix.name in names]
    judged = judge(order(chosen), tree)
    assert {item.verdict for item in judged} == {"apply"}, [item.reasons for item in judged]
    modules = plan_modules(judged, tree)
    fill_store(modules, home)
    planned = [
        PlannedFix(
            name=item.fix.name,
            verdict="apply",
            flag=item.fix.flag.name if item.fix.flag else None,
            value=values.get(item.fix.name, item.fix.flag.default) if item.fix.flag else None,
            value_from="recipe",
            reasons=(),
            targets=tuple(dataclasses.asdict(target) for target in item.targets),
            digest=fix_digest(item.fix),
        )
        for item in judged
    ]
    plan = Plan(
        cache_key="0123456789abcdef",
        recipe={"name": "test", "file": "test.yaml", "variant": None},
        folders={},
        vllm={"version": tree.version, "path": str(tree.root / "vllm"), "torch": "none"},
        model="m",
        served_model="m",
        serve={},
        env={},
        fixes=tuple(planned),
        overrides=(),
        requires={},
        smoke={},
        modules=modules.entries,
    )
    return write_plan(plan, home)
