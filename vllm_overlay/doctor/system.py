"""Checks of the system: caches, limits, clock, secrets."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from vllm_overlay.doctor.check import FAIL, OK, WARN, Check, Look
from vllm_overlay.doctor.gpu import GiB
from vllm_overlay.recipe_format import CACHE_VARIABLES

LEAST_FREE = GiB  # bytes: a compile cache and a plan take less, logs of a crash may take more
UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
STATUS_OFFSET = 40  # of `status` in struct timex on 64-bit Linux
TIMEX_BYTES = 208
AHEAD_SECONDS = 60.0
HOME_REMEDY = "mount a writable volume there, or name another folder with VLLM_OVERLAY_HOME"
SECRETS = ("HF_TOKEN", "VLLM_API_KEY")


def caches(look: Look) -> list[Check]:
    """Check that the state folder and the caches can be written, and run what is compiled there."""
    folders = {"the state folder": look.home}
    if look.plan is not None:
        folders |= {name: Path(look.env[name]) for name in CACHE_VARIABLES if name in look.env}
    places: dict[Path, list[str]] = {}
    for name, folder in folders.items():
        places.setdefault(_existing(folder), []).append(name)
    checks = [check for place, names in places.items() for check in _place(place, names)]
    return checks or [Check("caches", OK, f"{', '.join(folders)}: writable")]


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest above it that exists or cannot be looked into."""
    with contextlib.suppress(OSError):
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
    return folder


def _place(place: Path, names: list[str]) -> list[Check]:
    whose = ", ".join(names)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
        stat = os.statvfs(place)
    except OSError as error:
        detail = f"{whose} cannot be written: {place}: {error.strerror}"
        return [Check("caches", FAIL, detail, HOME_REMEDY)]
    if stat.f_flag & os.ST_NOEXEC and any(name in CACHE_VARIABLES for name in names):
        detail = f"{whose}: {place} is mounted noexec, and what is compiled there cannot be loaded"
        return [Check("caches", FAIL, detail, "mount it with exec")]
    free = stat.f_bavail * stat.f_frsize
    if free < LEAST_FREE:
        detail = f"{whose}: {free / GiB:.2f} GiB are free at {place}"
        return [Check("caches", WARN, detail, "make room: `vllm-overlay cache prune`")]
    return []


def core(_: Look) -> list[Check]:
    """Check that a crash writes no core file: it would hold prompts, answers and secrets."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_CORE)
    if soft == 0:
        return [Check("core", OK, "no core files")]
    size = "of any size" if soft == resource.RLIM_INFINITY else f"of up to {soft:,} bytes"
    detail = f"a crash writes a core file {size}, with prompts and secrets in it"
    remedy = "turn it off: ulimits core 0 in compose, --ulimit core=0 of docker run, ulimit -c 0"
    return [Check("core", WARN, detail, remedy)]


def clock(look: Look) -> list[Check]:
    """Check that the clock is no earlier than the files of this program, and synchronised.

    A wrong clock breaks TLS, tokens, and the order of what several nodes log.
    """
    files = [Path(__file__)]
    if look.plan is not None:
        files.append(Path(look.plan.recipe["file"]))
    newest = max((file.stat().st_mtime, file) for file in files if file.exists())
    behind = newest[0] - time.time()
    if behind > AHEAD_SECONDS:
        detail = f"the clock is {behind / 3600:.1f} h earlier than the time of {newest[1]}"
        return [Check("clock", WARN, detail, "set the host's clock, and let NTP keep it")]
    synchronised = _synchronised()
    shown = {None: "no earlier than this program", True: "synchronised", False: "not synchronised"}
    if synchronised is False and (look.plan is None or look.nodes > 1):
        remedy = "run chrony or systemd-timesyncd on the host"
        return [Check("clock", WARN, shown[synchronised], remedy)]
    return [Check("clock", OK, shown[synchronised])]


def _synchronised() -> bool | None:
    """Return what adjtimex(2) says; None where the system has none."""
    buffer = (ctypes.c_char * TIMEX_BYTES)()
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.adjtimex(buffer) >= 0:
            status = int.from_bytes(buffer.raw[STATUS_OFFSET : STATUS_OFFSET + 4], sys.byteorder)
            return not status & UNSYNCHRONISED
    return None


def secrets(look: Look) -> list[Check]:
    """Check that the secrets of the environment can be sent. No value is ever shown."""
    there = [name for name in SECRETS if name in look.env]
    checks = []
    for name in there:
        value = look.env[name]
        if not value:
            detail = f"{name} is set, and empty: it counts as not set"
            checks.append(Check("secrets", WARN, detail, f"unset {name}, or give it a value"))
        elif not (value.isascii() and value.isprintable() and " " not in value):
            detail = f"{name} holds a blank, a line end or another character no header may hold"
            checks.append(Check("secrets", FAIL, detail, f"set {name} again, without it"))
    missing = [name for name in SECRETS if name not in there]
    shown = [f"{name} is set" for name in there] + [f"{name} is not set" for name in missing]
    return checks or [Check("secrets", OK, ", ".join(shown))]
