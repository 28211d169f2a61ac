"""Checks of the GPUs: driver and CUDA, what a recipe requires, ranks, free memory."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path

from vllm_overlay.capacity import gpu_share
from vllm_overlay.doctor.check import FAIL, OK, WARN, Check, Look, failed
from vllm_overlay.host import check_requires
from vllm_overlay.subject import count

# The least driver for a major release of CUDA, by NVIDIA's table of minor-version compatibility.
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
NVIDIA = "0x10de"
GiB = 2**30
PASS_ON = "install NVIDIA's driver; in a container also its container toolkit, and pass --gpus all"


def driver(look: Look) -> list[Check]:
    """Check that the driver is there, and new enough for the CUDA that torch is built for."""
    cuda = torch_cuda()
    if look.gpus:
        return [_driver_version(look.gpus[0].driver, cuda)]
    cards = _cards(look.root)
    if cuda is not None:
        there = f"{cards} NVIDIA cards are in the machine" if cards else "no NVIDIA card is here"
        if "CUDA_VISIBLE_DEVICES" in look.env:
            there = f"CUDA_VISIBLE_DEVICES is '{look.env['CUDA_VISIBLE_DEVICES']}'"
        detail = f"no GPU can be used ({there}), and torch is built for CUDA {cuda}"
        return [Check("driver", FAIL, detail, PASS_ON)]
    if cards:
        detail = f"{cards} NVIDIA cards are in the machine, but this torch is built without CUDA"
        return [Check("driver", WARN, detail, "serve from the cuda image to use them")]
    return [Check("driver", OK, "no GPU here, and torch is built for the CPU")]


def _driver_version(version: str, cuda: str | None) -> Check:
    if cuda is None:
        detail = f"driver {version}, but this torch is built without CUDA"
        return Check("driver", WARN, detail, "serve from the cuda image to use the GPU")
    least = LEAST_DRIVER.get(int(cuda.partition(".")[0]))
    major = version.partition(".")[0]
    if least is not None and major.isdecimal() and int(major) < least:
        detail = f"driver {version} is too old for CUDA {cuda} without its compatibility package"
        return Check("driver", WARN, detail, f"update the driver to {least} or newer")
    return Check("driver", OK, f"driver {version}, CUDA {cuda}")


def torch_cuda() -> str | None:
    """Return the CUDA release of torch, without importing it; None where it is built for a CPU."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    found = re.search(r"(?m)^cuda\b[^=]*= *'([0-9.]+)'", file.read_text() if file.is_file() else "")
    return found[1] if found else None


def _cards(root: Path) -> int:
    """Return how many NVIDIA GPUs the PCI bus has."""
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            count += vendor == NVIDIA and (device / "class").read_text().startswith("0x03")
        except OSError:
            continue
    return count


def requires(look: Look) -> list[Check]:
    """Check what the recipe requires of the machine."""
    if look.plan is None:
        return []
    errors = check_requires(look.plan.requires, look.gpus)
    if errors:
        return failed("requires", errors)
    wanted = ", ".join(f"{key} {value}" for key, value in look.plan.requires.items())
    return [Check("requires", OK, wanted or "the recipe requires nothing of the machine")]


def ranks(look: Look) -> list[Check]:
    """Check that this node has a GPU for each of its ranks."""
    backends = ("distributed-executor-backend", "data-parallel-backend")
    elsewhere = any(look.serve.get(flag) == "ray" for flag in backends)
    if look.plan is None or not look.gpus or elsewhere:
        return []
    sizes, here = _sizes(look), _here(look)
    shown = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1) or "one rank"
    if look.nodes > 1:
        shown += f" over {look.nodes} nodes"
    if here > len(look.gpus):
        detail = f"{shown}: {here} GPUs for this node, and it has {len(look.gpus)}"
        return [Check("ranks", FAIL, detail, "serve a variant for fewer GPUs, or on more nodes")]
    return [Check("ranks", OK, f"{shown}: {here} of {len(look.gpus)} GPUs")]


def _sizes(look: Look) -> dict[str, int]:
    """Return by what the ranks multiply; of data-parallel engines, those that start here."""
    flags = ["tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size"]
    if "data-parallel-rank" not in look.serve:
        local = "data-parallel-size-local" in look.serve
        flags.append("data-parallel-size-local" if local else "data-parallel-size")
    return {flag: count(look.serve, flag) for flag in flags}


def _here(look: Look) -> int:
    """Return how many GPUs this node's ranks want."""
    return -(-math.prod(_sizes(look).values()) // look.nodes)


def free(look: Look) -> list[Check]:
    """Check that each GPU that is used has as much free memory as vLLM will ask for."""
    if look.plan is None:
        return []
    share = gpu_share(look.serve)
    checks = []
    for index, gpu in enumerate(look.gpus[: _here(look)]):
        if gpu.memory is None or gpu.free is None or gpu.free >= share * gpu.memory:
            continue
        shown = f"{gpu.free / GiB:.1f} of {gpu.memory / GiB:.1f} GiB are free"
        detail = f"GPU {index} ({gpu.name}): {shown}, and vLLM asks for {share:g} of all"
        remedy = "end what uses the GPU (nvidia-smi lists it), or lower gpu-memory-utilization"
        checks.append(Check("gpu-free", FAIL, detail, remedy))
    return checks or [Check("gpu-free", OK, f"{len(look.gpus)} GPUs")] if look.gpus else []
