"""Keeps a measurement as JSON, with date, hardware and command."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_overlay.errors import ConfigError
from vllm_overlay.host import gpus
from vllm_overlay.plan import write_file

CHECKOUT = Path(__file__).resolve().parent.parent.parent
RESULTS = CHECKOUT / "bench" / "results"


def results_folder(named: Path | None, home: Path) -> Path:
    """Return the folder of results, made if need be: ``named``, else the checkout's or ``home``'s.

    Raises ConfigError if nothing can be written there.
    """
    checkout = (CHECKOUT / "pyproject.toml").is_file()
    folder = named or (RESULTS if checkout else home / "bench")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = None if os.access(folder, os.W_OK) else "no permission to write"
    except OSError as error:
        found = error.strerror
    if found:
        raise ConfigError(
            "results cannot be kept there", file=folder, found=found,
            expected="a folder that can be written", remedy="name another with --save",
        )  # fmt: skip
    return folder


def save(
    name: str,
    command: str,
    rows: Sequence[Mapping[str, Any]],
    gpu: Mapping[str, str] | None = None,
    folder: Path = RESULTS,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write the rows of a measurement made by ``command``, and ``more``; return the new file.

    ``gpu``: what it ran on, and the versions of what compiled the kernels. Where the file was put
    says nothing: ``command`` is kept without the folder of its ``--save``.
    """
    command = re.sub(r"(?<= --save) (?!-)\S+", "", command)
    now = datetime.now(UTC)
    ends = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    files = (folder / f"{name}-{now:%Y-%m-%d}{end}.json" for end in ends)
    file = next(file for file in files if not file.exists())
    body = {
        "date": now.isoformat(timespec="seconds"),
        "command": command,
        "hardware": {**hardware(), **({"gpu": gpu} if gpu else {})},
        "python": platform.python_version(),
        **(more or {}),
        "rows": rows,
    }
    write_file(file, (json.dumps(body, indent=1) + "\n").encode())
    return file


def hardware() -> dict[str, Any]:
    """Return what this machine has. Raises ConfigError where its GPUs cannot be asked for."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else "unknown",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "gpus": [gpu.name for gpu in gpus()],
    }
