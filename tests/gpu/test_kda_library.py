"""The CUDA library of this machine's own GPU: built, loaded, and told apart from none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():  # before anything large is imported
    pytest.skip("no GPU", allow_module_level=True)

import torch

from vllm_overlay.kda import build, native
from vllm_overlay.kda.files import FOLDER, SOURCE, sources


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_the_form_of_a_device_follows_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.zeros(1, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    for name in sources(FOLDER):
        shutil.copy(FOLDER / name, tmp_path)
    monkeypatch.setattr(native, "FOLDER", tmp_path / "none")
    why = f"no CUDA library in {tmp_path / 'none'}"
    assert (native.form("cuda"), native.identity()) == (f"triton: {why}", "none")
    build.build(tmp_path / SOURCE, [major * 10 + minor], tmp_path)
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    digest = native.identity()
    assert native.form("cuda") == f"cuda sm_{major}{minor} {digest[:12]}"
    assert native.form("cpu") == "triton: no CUDA library for cpu"
