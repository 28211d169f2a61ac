"""What is installed beside the recipe: the same on every node, or they are not of one image."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from vllm_overlay.activate.planfile import sha256

SYSTEM = Path("/var/lib/dpkg/status")


def build_id() -> str:
    """Return a digest of this Python's packages, of this program, and of the system's packages.

    Two images of the same content have the same one, whoever built them.
    """
    lines = [os.uname().machine]
    for found in importlib.metadata.distributions():
        record = (found.read_text("RECORD") or "").splitlines()
        # Compiled files are written at any time, and hold the time of their source.
        kept = sorted(line for line in record if ".pyc," not in line)
        lines.append(f"{found.name} {found.version} {sha256(chr(10).join(kept).encode())}")
    package = Path(__file__).parent
    lines += [
        f"{file.relative_to(package)} {sha256(file.read_bytes())}" for file in package.rglob("*.py")
    ]
    if SYSTEM.is_file():
        lines.append(f"dpkg {sha256(SYSTEM.read_bytes())}")
    return sha256("\n".join(sorted(lines)).encode())
