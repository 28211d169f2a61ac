"""Kimi-K3's recipe: each variant meets its fixes' needs, and what would not is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_overlay.fix import check_needs, load_fixes
from vllm_overlay.needs import Subject
from vllm_overlay.recipe import load_recipe

ROOT = Path(__file__).parents[2]
FIXES = load_fixes(ROOT / "fixes")
DEFERRED = FIXES["kimi-k3-deferred-recoverssm"]
FLAG = "VLLM_KIMI_K3_DEFERRED_RECOVERSSM"
# By variant: whether it defers, and the flag that it sets.
VARIANTS = {
    None: (True, None),
    "tp16-dcp8": (True, None),
    "exact": (True, "flush"),
    "tp16-dcp8-stock": (False, None),
}


def subject(serve: Mapping[str, Any], env: Mapping[str, str]) -> Subject:
    return Subject(serve, env, None, None, "9.0")


def test_every_variant_is_looked_at() -> None:
    written = yaml.safe_load((ROOT / "recipes" / "kimi-k3.yaml").read_text())
    assert {None, *written["variants"]} == VARIANTS.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_meets_the_needs_of_its_fixes(variant: str | None) -> None:
    recipe = load_recipe("kimi-k3", folder=ROOT / "recipes", variant=variant)
    defers, value = VARIANTS[variant]
    assert (DEFERRED.name in recipe.fixes) is defers
    assert recipe.env.get(FLAG) == value
    for name in recipe.fixes:
        assert check_needs(FIXES[name], subject(recipe.serve, recipe.env)) == ([], [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use-replayssm": False}, "use-replayssm"),
        ({"speculative-config": None}, "speculative-config"),
        ({"kv-transfer-config": {"kv_connector": "NixlConnector"}}, "kv-transfer-config"),
        ({"kv-offloading-size": 8}, "kv-offloading-size"),
    ],
)
def test_flags_that_it_cannot_serve(change: dict[str, Any], said: str) -> None:
    recipe = load_recipe("kimi-k3", folder=ROOT / "recipes")
    (error,) = check_needs(DEFERRED, subject({**recipe.serve, **change}, recipe.env))[0]
    assert said in str(error)


def test_the_old_model_runner() -> None:
    recipe = load_recipe("kimi-k3", folder=ROOT / "recipes")
    env = {**recipe.env, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    (error,) = check_needs(DEFERRED, subject(recipe.serve, env))[0]
    assert "VLLM_USE_V2_MODEL_RUNNER" in str(error)
