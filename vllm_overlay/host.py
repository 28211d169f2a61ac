"""What this machine has: GPUs and shared memory, and whether that is what a recipe requires."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from vllm_overlay.errors import ConfigError

MEMINFO = Path("/proc/meminfo")
NO_GPU = "run on a machine with a GPU that this user may use"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


QUERY_SECONDS = 30.0
UNSAID = re.compile(r"\[?(N/A|Not Supported)\]?", re.IGNORECASE)


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi names it.

    ``memory`` in bytes; None for a GPU that has none of its own, such as the GB10, and shares the
    host's.
    """

    name: str
    capability: str
    memory: int | None


def gpus() -> list[Gpu]:
    """Return the node's GPUs, none where there is no driver.

    Raises ConfigError where the driver's own command fails: what GPUs there are is then unknown.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(
            query, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise _unknown_gpus(f"no answer from {command} within {QUERY_SECONDS:g} s") from None
    except OSError as error:
        raise _unknown_gpus(f"{command}: {error.strerror}") from None
    lines = run.stdout.splitlines()
    if run.returncode:
        said = " ".join((run.stdout + run.stderr).split())[:200]
        raise _unknown_gpus(f"{command} ended with {run.returncode}: {said}")
    return [_gpu(line) for line in lines if line.strip()]


def _gpu(line: str) -> Gpu:
    try:
        name, capability, memory = (word.strip() for word in line.rsplit(",", 2))
        Version(capability)
        return Gpu(name, capability, None if UNSAID.fullmatch(memory) else int(memory) * 2**20)
    except ValueError:
        raise _unknown_gpus(f"nvidia-smi's line {line!r}") from None


def _unknown_gpus(found: str) -> ConfigError:
    return ConfigError(
        "the GPUs of this machine cannot be asked for",
        found=found,
        expected="a working nvidia-smi",
        remedy="repair the driver, or, to serve on the CPU, take nvidia-smi off the PATH",
    )


def host_memory() -> int:
    """Return the machine's memory in bytes: MemTotal of /proc/meminfo."""
    match = re.search(r"(?m)^MemTotal: +(\d+) kB$", MEMINFO.read_text())
    assert match
    return int(match[1]) * 2**10


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
    for key, check in (("compute-capability", _check_capability), ("gpu-memory", _check_memory)):
        if (wanted := requires.get(key)) is not None:
            errors += check(wanted, found) if found else [_short(key, "no GPU", wanted, NO_GPU)]
    shared = requires.get("shm")
    if shared is not None:
        stat = os.statvfs("/dev/shm")
        total = stat.f_blocks * stat.f_frsize
        if total < size(shared):
            amount = f"{total / 2**30:.2f}GiB in /dev/shm"
            errors.append(_short("shm", amount, shared, "raise shm_size of the container"))
    return errors


def _check_capability(wanted: str, found: list[Gpu]) -> list[ConfigError]:
    remedy, specifier = "run on another GPU", _specifier(wanted)
    return [
        _short("compute-capability", f"{gpu.capability} ({gpu.name})", wanted, remedy)
        for gpu in found
        if Version(gpu.capability) not in specifier
    ]


def _check_memory(wanted: str, found: list[Gpu]) -> list[ConfigError]:
    errors = []
    for gpu in found:
        memory = host_memory() if gpu.memory is None else gpu.memory
        if memory < size(wanted):
            whose = f"{gpu.name}, the host's memory" if gpu.memory is None else gpu.name
            amount = f"{memory / 2**30:.0f}GiB ({whose})"
            errors.append(_short("gpu-memory", amount, wanted, "run on a larger GPU"))
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
