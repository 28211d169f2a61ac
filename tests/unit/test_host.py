"""What a recipe requires of the machine, against what nvidia-smi and the kernel say."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_overlay.host import check_requires, gpu_architecture, gpus, size


@pytest.fixture
def two_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi, as it answers on a node with two H200."""
    command = tmp_path / "nvidia-smi"
    row = "NVIDIA H200, 9.0, 143771"
    command.write_text(f"#!/bin/sh\necho '{row}'\necho '{row}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus() == [] and gpu_architecture().startswith("cpu-")
    (error,) = check_requires({"gpus": 4})
    assert "requires.gpus" in str(error) and "found 0" in str(error) and "expected 4" in str(error)


@pytest.mark.usefixtures("two_h200")
def test_what_is_there_is_enough() -> None:
    requires = {"gpus": 2, "compute-capability": ">=9.0", "gpu-memory": "120GiB"}
    assert check_requires(requires) == [] and gpu_architecture() == "sm_90"


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
    errors = check_requires(requires)
    assert errors and all(says in str(error) for error in errors)


def test_sizes() -> None:
    assert size("16GiB") == 16 * 2**30 and size("1.5MiB") == 3 * 2**19
    with pytest.raises(ValueError, match="GiB"):
        size("16GB")
