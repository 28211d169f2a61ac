"""What a recipe requires of the machine, against what nvidia-smi and the kernel say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_overlay import host
from vllm_overlay.errors import ConfigError
from vllm_overlay.host import Gpu, check_requires, gpu_architecture, gpus, size, visible

Driver = Callable[[str], None]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Puts a stand-in for nvidia-smi on the PATH: a shell script."""

    def write(script: str) -> None:
        command = tmp_path / "nvidia-smi"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return write


@pytest.fixture
def two_h200(driver: Driver) -> None:
    """nvidia-smi as it answers on a node with two H200."""
    row = "NVIDIA H200, 9.0, 143771, 143000, 580.95.05, GPU-1"
    driver(f"echo '{row}'; echo '{row}'")


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus() == () and gpu_architecture().startswith("cpu-")
    (error,) = check_requires({"gpus": 4}, gpus())
    assert "requires.gpus" in str(error) and "found 0" in str(error) and "expected 4" in str(error)


@pytest.mark.usefixtures("two_h200")
def test_what_is_there_is_enough() -> None:
    requires = {"gpus": 2, "compute-capability": ">=9.0", "gpu-memory": "120GiB"}
    assert check_requires(requires, gpus()) == [] and gpu_architecture() == "sm_90"


@pytest.mark.usefixtures("two_h200")
@pytest.mark.parametrize(
    ("requires", "says"),
    [
        ({"gpus": 4}, "found 2"),
        ({"compute-capability": ">=10.0"}, "9.0 (NVIDIA H200)"),
        ({"gpu-memory": "180GiB"}, "140GiB"),
        ({"shm": "1024TiB"}, "/dev/shm"),
    ],
)
def test_what_falls_short_is_named(requires: dict[str, object], says: str) -> None:
    errors = check_requires(requires, gpus())
    assert errors and all(says in str(error) for error in errors)


@pytest.mark.parametrize(
    ("value", "left"),
    [
        (None, "abc"),
        ("1", "b"),
        ("2,0", "ca"),
        ("GPU-b", "b"),
        (" GPU-c , 1", "cb"),
        ("0,7,1", "a"),
        ("", ""),
        ("-1", ""),
        ("none", ""),
    ],
)
def test_the_gpus_that_cuda_sees(value: str | None, left: str) -> None:
    found = [Gpu(uuid, "9.0", 1, 1, "580", f"GPU-{uuid}00") for uuid in "abc"]
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert "".join(gpu.name for gpu in visible(found, environ)) == left


def test_sizes() -> None:
    assert size("16GiB") == 16 * 2**30 and size("1.5MiB") == 3 * 2**19
    with pytest.raises(ValueError, match="GiB"):
        size("16GB")


@pytest.mark.parametrize("memory", ["[N/A]", "[Not Supported]", "N/A"])
def test_a_gpu_without_memory_of_its_own_has_the_host_s(
    driver: Driver, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DGX Spark: its GB10 and its CPU share one memory, and nvidia-smi names no size."""
    driver(f"echo 'NVIDIA GB10, 12.1, {memory}, {memory}, 580.95.05, GPU-1'")
    (tmp_path / "meminfo").write_text("MemTotal:       125513700 kB\nMemFree:  1 kB\n")
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    (gpu,) = gpus()
    assert (gpu.name, gpu.memory, gpu.free) == ("NVIDIA GB10", None, None)
    assert check_requires({"gpus": 1, "gpu-memory": "110GiB"}, gpus()) == []
    (error,) = check_requires({"gpu-memory": "121GiB"}, gpus())
    assert "found 120GiB (NVIDIA GB10, the host's memory)" in str(error)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", "ended with 9: NVIDIA-SMI has failed"),
        ("exec sleep 60", "no answer"),
        ("echo 'No devices were found'", "No devices were found"),
        ("echo 'NVIDIA X, 9.0, much, 1, 580, GPU-1'", "NVIDIA X, 9.0, much"),
    ],
)
def test_a_driver_that_does_not_answer_is_no_machine_without_gpus(
    driver: Driver, script: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled for a GPU must not end up under the cache key of a CPU."""
    monkeypatch.setattr(host, "QUERY_SECONDS", 0.5 if "sleep" in script else 30.0)
    driver(script)
    with pytest.raises(ConfigError) as caught:
        gpu_architecture()
    text = str(caught.value)
    assert says in text and "repair the driver" in text


@pytest.mark.parametrize("requires", [{"compute-capability": ">=9.0"}, {"gpu-memory": "1GiB"}])
def test_no_gpu_at_all_falls_short(
    requires: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (error,) = check_requires(requires, gpus())
    assert f"requires.{next(iter(requires))}" in str(error) and "found no GPU" in str(error)
