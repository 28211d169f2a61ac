"""Checks of memory: /dev/shm, weights with KV cache, and the states of a hybrid model, as sums."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vllm_overlay.capacity import RELEASE, Capacity, capacity, gpu_share, sum_lines
from vllm_overlay.doctor.check import FAIL, OK, WARN, Check, Look, failed
from vllm_overlay.doctor.gpu import GiB
from vllm_overlay.errors import ConfigError
from vllm_overlay.host import host_memory
from vllm_overlay.hybridmodel import hybrid_shape
from vllm_overlay.hybridrank import NotCoveredError, number
from vllm_overlay.modelconfig import NAME, read_model_config
from vllm_overlay.needs import ONE_STATE
from vllm_overlay.subject import rank_count, room
from vllm_overlay.weights import weight_bytes

# vLLM's ranks pass messages through a ring of 10 chunks of 16 MiB, and NCCL needs some of its own.
LEAST_SHM = 256 * 2**20
GOOD_SHM = GiB
SHM_REMEDY = "raise it: shm_size in compose, --shm-size of docker run"
UNLIMITED = 2**60


def shm(look: Look) -> list[Check]:
    """Check that /dev/shm has room for what the ranks of a node pass to each other."""
    try:
        stat = os.statvfs(look.root / "dev/shm")
    except OSError as error:
        detail = f"/dev/shm cannot be used: {error.strerror}"
        return [Check("shm", FAIL, detail, "mount a tmpfs there")]
    free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    detail = f"{free / GiB:.2f} of {total / GiB:.2f} GiB are free in /dev/shm"
    several = look.ranks > 1
    if several and free < LEAST_SHM:
        return [Check("shm", FAIL, f"{detail}: the ranks' messages need more", SHM_REMEDY)]
    if free < GOOD_SHM:
        return [Check("shm", WARN, f"{detail}: too little for several ranks", SHM_REMEDY)]
    return [Check("shm", OK, detail)]


def memory(look: Look) -> list[Check]:
    """Check that weights and KV cache fit into the memory, and show the sum."""
    folder = look.model_folder
    if folder is None or look.serve.get("load-format") == "dummy":
        return []
    try:
        weights = weight_bytes(folder)
    except ConfigError:
        return []  # the check of the model says so
    if not weights:
        return []
    return [_gpu_sum(look, weights) if look.gpus else _host_sum(look, weights)]


def _gpu_sum(look: Look, weights: int) -> Check:
    ranks, gpu = rank_count(look.serve), min(look.gpus, key=lambda gpu: gpu.memory or host_memory())
    total = gpu.memory or host_memory()
    share = gpu_share(look.serve)
    part = weights / ranks
    pinned = _pinned(look)
    lines = [f"weights {_gib(weights)} / {ranks} ranks = {_gib(part)}"]
    if pinned is None:
        limit, whose = share * total, f"{share:g} of {_gib(total)}"
        rest = _gib(limit - part)
        lines.append(f"{whose} = {_gib(limit)}; less the weights: {rest} for the rest")
    else:
        limit, whose = float(total), _gib(total)
        part += pinned
        lines.append(f"+ KV cache {_gib(pinned)} = {_gib(part)} of {whose}")
    detail = "\n".join(lines)
    if part > limit:
        remedy = "use more GPUs (tensor-parallel-size), smaller weights, or less KV cache"
        return Check("memory", FAIL, f"{detail}\ndoes not fit into {whose}", remedy)
    return Check("memory", OK, detail)


def _host_sum(look: Look, weights: int) -> Check:
    space = look.env.get("VLLM_CPU_KVCACHE_SPACE", "")
    kv = (int(space) if space.isdecimal() else 0) * GiB * look.ranks
    need, there = weights + kv, available(look.root)
    detail = (
        f"weights {_gib(weights)} + KV cache {_gib(kv)} (VLLM_CPU_KVCACHE_SPACE) = {_gib(need)}\n"
        f"{_gib(there)} of the host's memory are available"
    )
    if need > there:
        remedy = "lower VLLM_CPU_KVCACHE_SPACE, or serve a smaller model or on a larger machine"
        return Check("memory", FAIL, detail, remedy)
    return Check("memory", OK, detail)


def available(root: Path) -> int:
    """Return the bytes that a new process can have: the system's, or the container's limit."""
    text = (root / "proc/meminfo").read_text()
    found = re.search(r"(?m)^MemAvailable: +(\d+) kB$", text)
    there = int(found[1]) * 2**10 if found else UNLIMITED
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = (root / "sys/fs/cgroup" / name).read_text().strip()
        except OSError:
            continue
        there = min(there, int(limit) if limit.isdecimal() else UNLIMITED)
    return there


def states(look: Look) -> list[Check]:
    """Check how many requests' states of a hybrid model fit, against max-num-seqs."""
    folder = look.model_folder
    if folder is None or not (folder / NAME).is_file():
        return []
    try:
        shape = hybrid_shape(read_model_config(folder, look.serve.get("hf-overrides")))
        if shape is None:
            return []
        memory, capability = (
            room(folder, look.serve, look.gpus),
            look.gpus[0].capability if look.gpus else None,
        )
        stock, one = (
            capacity(shape, look.serve, recoverssm=one, capability=capability, memory=memory)
            for one in (False, True)
        )
    except ConfigError as error:
        return failed("states", [error])
    except NotCoveredError as reason:
        detail = f"the arithmetic does not cover {reason}"
        return [Check("states", WARN, detail, "look at vLLM's own line on its KV cache")]
    kept = any(need.key == ONE_STATE for fix in look.applied for need in fix.needs)
    version = look.plan.vllm.get("version", RELEASE) if look.plan else RELEASE
    other = [] if version == RELEASE else [f"vLLM {version} may count otherwise than {RELEASE}"]
    return [_states(one if kept else stock, stock, one, other)]


def _states(used: Capacity, stock: Capacity, one: Capacity, notes: list[str]) -> Check:
    each = [
        f"{name} {result.blocks_of(peak=False)} blocks a request, {result.blocks_of()} at its peak"
        + ("" if result.blocks is None else f": {result.requests(peak=False)} requests fit")
        for name, result in (("without RecoverSSM:", stock), ("with it:", one))
    ]
    detail = "\n".join([*sum_lines(used), *each, *notes])
    fit, peak = used.requests(peak=False), used.requests()
    if fit is None or peak is None or peak >= used.wanted:
        return Check("states", OK, detail)
    if not peak:
        remedy = "give more KV memory, or use more ranks: not one request fits"
        return Check("states", FAIL, detail, remedy)
    remedy = f"set max-num-seqs to {peak} or up to {fit}, or give more KV memory"
    return Check("states", WARN, detail, remedy)


def _pinned(look: Look) -> int | None:
    try:
        return number(look.serve, "kv-cache-memory-bytes")
    except NotCoveredError:
        return None  # vLLM's parser refuses the value


def _gib(size: float) -> str:
    return f"{size / GiB:.2f} GiB"
