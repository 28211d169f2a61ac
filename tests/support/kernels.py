"""Runs code with Triton's interpreter: kernels on the CPU, as Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.serving import environment
from vllm_overlay.folders import home_folder
from vllm_overlay.releases import find_tree
from vllm_overlay.upstream import Tree

ROOT = Path(__file__).parents[2]
FIXES = ROOT / "fixes"
KERNELS = Path(sys.prefix) / "opt" / "kernels"  # apart: vLLM on the CPU must not find Triton
INTERPRETED = {
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",  # without it, vLLM replaces Triton by a stand-in
}


def release(version: str) -> Tree:
    """Return the Python files of a vLLM release, kept between runs."""
    return find_tree(version, home_folder(os.environ))


def interpreted(
    *code: str,
    home: Path,
    plan: Path | None = None,
    tree: Tree | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *code`` with Triton interpreted, and with a plan if one is given.

    ``tree`` takes the place of the installed vLLM.
    """
    path = [str(KERNELS), str(ROOT)] if tree is None else [str(tree.root), str(KERNELS), str(ROOT)]
    env = {**INTERPRETED, "PYTHONPATH": os.pathsep.join(path), **(env or {})}
    if tree is None:  # a release's own platform is none, and keeps Triton's kernels
        env["VLLM_TARGET_DEVICE"] = "cpu"
    if plan:
        env["VLLM_OVERLAY_PLAN"] = str(plan)
    return subprocess.run(
        [sys.executable, *code],
        env=environment(home, env),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
