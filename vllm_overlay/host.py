"""What this machine has: GPUs and shared memory, and whether that is what a recipe requires."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from vllm_overlay.errors import ConfigError

MEMINFO = Path("/proc/meminfo")
NO_GPU = "run on a machine with a GPU that this user may use"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


QUERY = "name,compute_cap,memory.total,memory.free,driver_version,uuid"
QUERY_SECONDS = 30.0
UNSAID = re.compile(r"\[?(N/A|Not Supported)\]?", re.IGNORECASE)


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi names it.

    ``memory`` and what is ``free`` of it in bytes; None for a GPU that has none of its own, such as
    the GB10, and shares the host's.
    """

    name: str
    capability: str
    memory: int | None
    free: int | None
    driver: str
    uuid: str


def visible(found: Sequence[Gpu], environ: Mapping[str, str]) -> Sequence[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; all where it is not set.

    As CUDA does, what follows a name that is no GPU's index or UUID is left out.
    """
    names = environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return found
    left: list[Gpu] = []
    for name in names.split(","):
        text = name.strip()
        by_index = found[int(text) : int(text) + 1] if text.isdecimal() else ()
        match = by_index or [gpu for gpu in found if text and gpu.uuid.startswith(text)]
        if not match:
            break
        left += match[:1]
    return tuple(left)


def gpus() -> Sequence[Gpu]:
    """Return the node's GPUs, none where there is no driver.

    Raises ConfigError where the driver's own command fails: what GPUs there are is then unknown.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    return _ask(command)


@functools.lru_cache(maxsize=1)
def _ask(command: str) -> Sequence[Gpu]:
    """Return what nvidia-smi says; a command of ours asks once, for each answer can take seconds.

    An error is not kept.
    """
    query = [command, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
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
    return tuple(_gpu(line) for line in lines if line.strip())


def _gpu(line: str) -> Gpu:
    try:
        name, capability, *sizes, driver, uuid = (word.strip() for word in line.rsplit(",", 5))
        Version(capability)
        memory, free = map(_mib, sizes)
        return Gpu(name, capability, memory, free, driver, uuid)
    except ValueError:
        raise _unknown_gpus(f"nvidia-smi's line {line!r}") from None


def _mib(text: str) -> int | None:
    return None if UNSAID.fullmatch(text) else int(text) * 2**20


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


def check_requires(requires: Mapping[str, Any], found: Sequence[Gpu]) -> list[ConfigError]:
    """Return every way in which this machine falls short of a recipe's ``requires``.

    ``found`` are its GPUs.
    """
    errors: list[ConfigError] = []
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


def _check_capability(wanted: str, found: Sequence[Gpu]) -> list[ConfigError]:
    remedy, specifier = "run on another GPU", _specifier(wanted)
    return [
        _short("compute-capability", f"{gpu.capability} ({gpu.name})", wanted, remedy)
        for gpu in found
        if Version(gpu.capability) not in specifier
    ]


def _check_memory(wanted: str, found: Sequence[Gpu]) -> list[ConfigError]:
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
