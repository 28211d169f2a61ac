"""Keeps a measurement in bench/results/, with date, hardware and command."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def save(
    name: str,
    command: str,
    rows: Sequence[Mapping[str, Any]],
    gpu: Mapping[str, str] | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Write the rows of a measurement made by ``command``; return the file.

    ``gpu``: what it ran on, and the versions of what compiled the kernels.
    """
    now = datetime.now(UTC)
    file = folder / f"{name}-{now:%Y-%m-%d}.json"
    body = {
        "date": now.isoformat(timespec="seconds"),
        "command": command,
        "hardware": {
            "cpu": cpu(),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            **({"gpu": gpu} if gpu else {}),
        },
        "python": platform.python_version(),
        "rows": rows,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(body, indent=1) + "\n")
    return file


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
