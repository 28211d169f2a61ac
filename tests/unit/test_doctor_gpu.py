"""Checks of the GPUs, with nvidia-smi, torch and /sys as they are on machines that have them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.looks import GIB, H200, look, only, plan_of
from vllm_overlay import doctor
from vllm_overlay.doctor import gpu

Torch = Callable[[str | None], None]


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Torch:
    """Puts a torch that is built for a CUDA release, or for the CPU, first on the path."""

    def write(cuda: str | None) -> None:
        package = tmp_path / "site/torch"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("raise AssertionError('torch was imported')")
        (package / "version.py").write_text(
            f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda!r}\nhip = None\n"
        )
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.syspath_prepend(package.parent)

    return write


def card(root: Path, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    device = root / "sys/bus/pci/devices" / f"0000:0{len(list(root.rglob('vendor')))}:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


@pytest.mark.parametrize(
    ("driver", "cuda", "state", "says"),
    [
        ("570.133.20", "13.0", "warn", "driver 570.133.20 is too old for CUDA 13.0"),
        ("580.95.05", "13.0", "ok", "driver 580.95.05, CUDA 13.0"),
        ("520.61", "12.8", "warn", "too old for CUDA 12.8"),
        ("580.95.05", None, "warn", "this torch is built without CUDA"),
    ],
)
def test_a_driver_that_is_too_old(
    torch: Torch, driver: str, cuda: str | None, state: str, says: str
) -> None:
    torch(cuda)
    check = only(gpu.driver(look(gpus=[replace(H200, driver=driver)])), state)
    assert says in check.detail
    if cuda and state == "warn":
        assert check.remedy == f"update the driver to {580 if cuda == '13.0' else 525} or newer"


def test_a_cuda_image_without_a_gpu(torch: Torch, tmp_path: Path) -> None:
    torch("13.0")
    check = only(gpu.driver(look(root=tmp_path)), "fail")
    assert "(no NVIDIA card is here), and torch is built for CUDA 13.0" in check.detail
    hidden = look(root=tmp_path, env={"CUDA_VISIBLE_DEVICES": "-1"})
    assert "(CUDA_VISIBLE_DEVICES is '-1')" in only(gpu.driver(hidden), "fail").detail
    card(tmp_path)
    card(tmp_path)
    card(tmp_path, vendor="0x8086")
    card(tmp_path, kind="0x040300")  # the card's sound
    check = only(gpu.driver(look(root=tmp_path)), "fail")
    assert "(2 NVIDIA cards are in the machine)" in check.detail and "--gpus all" in check.remedy


def test_a_cpu_image_on_a_machine_with_a_gpu(torch: Torch, tmp_path: Path) -> None:
    torch(None)
    only(gpu.driver(look(root=tmp_path)), "ok")
    card(tmp_path)
    only(gpu.driver(look(root=tmp_path)), "warn")


def test_a_driver_that_fails_leaves_the_other_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    first, *others = doctor.examine(None, tmp_path, {})
    assert (first.name, first.state) == ("driver", "fail")
    assert "ended with 9: NVIDIA-SMI has failed" in first.detail
    assert {"shm", "caches", "clock"} <= {check.name for check in others}


def test_what_cannot_be_looked_at_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked() -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("psutil.net_if_stats", locked)
    checks = {check.name: check for check in doctor.examine(None, tmp_path, {})}
    assert checks["interfaces"].state == "warn"
    assert checks["interfaces"].detail.endswith("Operation not permitted")
    assert "clock" in checks


def test_what_the_recipe_requires() -> None:
    plan = plan_of(requires={"gpus": 4, "shm": "1024TiB", "compute-capability": ">=10"})
    checks = gpu.requires(look(plan=plan, gpus=[H200]))
    assert [check.state for check in checks] == ["fail"] * 3
    assert "requires.gpus; found 1; expected 4" in checks[0].detail
    assert checks[0].remedy == "run on a machine that has them"
    assert only(gpu.requires(look(plan=plan_of(requires={"gpus": 1}), gpus=[H200])), "ok")


@pytest.mark.parametrize(
    ("serve", "state", "detail"),
    [
        ({"tensor-parallel-size": 4}, "fail",
         "tensor-parallel-size 4: 4 GPUs for this node, and it has 2"),
        ({"tensor-parallel-size": 2, "data-parallel-size": 2}, "fail",
         "tensor-parallel-size 2 x data-parallel-size 2: 4 GPUs for this node, and it has 2"),
        ({"tensor-parallel-size": 4, "nnodes": 2}, "ok",
         "tensor-parallel-size 4 over 2 nodes: 2 of 2 GPUs"),
        ({"tensor-parallel-size": 2, "data-parallel-size": 8, "data-parallel-size-local": 1}, "ok",
         "tensor-parallel-size 2: 2 of 2 GPUs"),
        ({"data-parallel-size": 8, "data-parallel-rank": 3}, "ok", "one rank: 1 of 2 GPUs"),
        ({"prefill-context-parallel-size": 3}, "fail",
         "prefill-context-parallel-size 3: 3 GPUs for this node, and it has 2"),
        ({"tensor-parallel-size": "many"}, "ok", "one rank: 1 of 2 GPUs"),
    ],
)  # fmt: skip
def test_more_ranks_than_gpus(serve: dict[str, Any], state: str, detail: str) -> None:
    assert only(gpu.ranks(look(serve, gpus=[H200, H200])), state).detail == detail


@pytest.mark.parametrize("flag", ["distributed-executor-backend", "data-parallel-backend"])
def test_ranks_of_ray_may_be_anywhere(flag: str) -> None:
    serve = {"tensor-parallel-size": 4, flag: "ray"}
    assert gpu.ranks(look(serve, gpus=[H200])) == []


def test_a_gpu_that_something_else_uses() -> None:
    busy = replace(H200, free=100 * GIB)
    two = {"tensor-parallel-size": 2}
    check = only(gpu.free(look(two, gpus=[H200, busy])), "fail")
    only(gpu.free(look(gpus=[H200, busy])), "ok")  # the second is not asked for
    assert check.detail == (
        "GPU 1 (NVIDIA H200): 100.0 of 140.0 GiB are free, and vLLM asks for 0.92 of all"
    )
    only(gpu.free(look({"gpu-memory-utilization": 0.7}, gpus=[busy])), "ok")
    shared = replace(H200, memory=None, free=None)
    only(gpu.free(look(gpus=[shared])), "ok")
