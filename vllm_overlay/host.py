"""What this machine has: GPUs and shared memory, and whether that is what a recipe requires."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from vllm_overlay.errors import ConfigError

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi names it; ``memory`` in bytes."""

    name: str
    capability: str
    memory: int


def gpus() -> list[Gpu]:
    """Return the node's GPUs, none where there is no driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = "--query-gpu=name,compute_cap,memory.total"
    run = subprocess.run(
        [command, query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    rows = [line.split(", ") for line in run.stdout.splitlines() if line.count(", ") == 2]
    return [Gpu(name, capability, int(memory) * 2**20) for name, capability, memory in rows]


def gpu_architecture() -> str:
    """Return what compiled code depends on: ``sm_90``, or ``cpu-x86_64`` without a GPU."""
    found = sorted({gpu.capability.replace(".", "") for gpu in gpus()})
    return "+".join(f"sm_{item}" for item in found) or f"cpu-{platform.machine()}"


def size(text: str) -> int:
    """Return a size such as ``120GiB`` in bytes. Raises ValueError for any other form."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    raise ValueError(f"{text!r} is not a number with one of {', '.join(UNITS)}")


def check_requires(requires: Mapping[str, Any]) -> list[ConfigError]:
    """Return every way in which this machine falls short of a recipe's ``requires``."""
    errors: list[ConfigError] = []
    found = gpus()
    count = requires.get("gpus")
    if count is not None and len(found) < count:
        errors.append(_short("gpus", len(found), count, "run on a machine that has them"))
    capability = requires.get("compute-capability")
    if capability is not None:
        wanted = _specifier(capability)
        for gpu in found:
            if Version(gpu.capability) not in wanted:
                errors.append(
                    _short(
                        "compute-capability",
                        f"{gpu.capability} ({gpu.name})",
                        capability,
                        "run on a newer GPU",
                    )
                )
    memory = requires.get("gpu-memory")
    if memory is not None:
        for gpu in found:
            if gpu.memory < size(memory):
                amount = f"{gpu.memory / 2**30:.0f}GiB ({gpu.name})"
                errors.append(_short("gpu-memory", amount, memory, "run on a larger GPU"))
    shared = requires.get("shm")
    if shared is not None:
        stat = os.statvfs("/dev/shm")
        total = stat.f_blocks * stat.f_frsize
        if total < size(shared):
            amount = f"{total / 2**30:.2f}GiB in /dev/shm"
            errors.append(_short("shm", amount, shared, "raise shm_size of the container"))
    return errors


def _specifier(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        raise ConfigError(
            "requires.compute-capability is no version range", found=repr(text), expected="'>=9.0'"
        ) from None


def _short(key: str, found: object, expected: object, remedy: str) -> ConfigError:
    return ConfigError(
        f"this machine falls short of the recipe's requires.{key}",
        found=found,
        expected=expected,
        remedy=remedy,
    )
