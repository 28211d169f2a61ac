"""Why RecoverSSM's verify is exact: compiled for Hopper, its sums start as the stock kernel's do.

A sum over a thread's own elements and then over the warp has one order for each layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernels import FIXES, interpreted, release
from tests.support.plans import write_fixes_plan


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home: Path = tmp_path_factory.mktemp("layouts")
    tree = release("0.33.0")
    plan = write_fixes_plan(FIXES, home, tree=tree, names={"glm5next-recoverssm"})
    env = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(home / "triton")}
    run = interpreted("-m", "tests.support.kda_layouts", home=home, plan=plan, tree=tree, env=env)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("kind", ["aligned", "odd"])
def test_the_verify_sums_in_the_stock_kernel_s_order(
    kernels: dict[str, Any], kind: str, rows: int
) -> None:
    stock, verify = kernels[f"stock {kind}"], kernels[f"verify {kind} {rows}"]
    assert len(stock["sums"]) == 4  # the norms of q and k, the correction, the output
    assert verify["sums"] == stock["sums"]


@pytest.mark.parametrize("kind", ["aligned", "odd"])
def test_the_same_tile_has_the_same_arithmetic(kernels: dict[str, Any], kind: str) -> None:
    """Products fused or not as in the stock kernel."""
    assert kernels[f"verify {kind} 8"]["counts"] == kernels[f"stock {kind}"]["counts"]


def test_an_odd_stride_is_another_order(kernels: dict[str, Any]) -> None:
    """Else the comparison above could not fail."""
    assert kernels["stock odd"]["sums"] != kernels["stock aligned"]["sums"]
