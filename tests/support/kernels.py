"""Runs code with Triton's interpreter: kernels on the CPU, as Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.serving import environment

TRITON = Path(sys.prefix) / "opt" / "triton"  # apart: vLLM on the CPU must not find it
INTERPRETED = {
    "PYTHONPATH": str(TRITON),
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",  # without it, vLLM replaces Triton by a stand-in
    "VLLM_TARGET_DEVICE": "cpu",
}


def interpreted(
    code: str, home: Path, plan: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -c code`` with Triton interpreted, and with a plan if one is given."""
    env = {**INTERPRETED, **({"VLLM_OVERLAY_PLAN": str(plan)} if plan else {})}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(home, env),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
