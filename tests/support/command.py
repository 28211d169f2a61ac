"""The command line as a user runs it, with a state folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAIN = "from vllm_overlay.cli import main; main()"


def argv(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", MAIN, *arguments]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "VLLM_OVERLAY_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}


def overlay(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run vllm-overlay in ``folder``, where its state is kept in home/. Nobody can be asked."""
    return subprocess.run(
        argv(arguments), cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )  # fmt: skip
