"""A folder like the package's kda/, with a library that a C compiler made: no CUDA is needed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from vllm_overlay.activate.planfile import sha256
from vllm_overlay.kda.files import LIBRARY, MANIFEST, SOURCE, digest, sources
from vllm_overlay.kda.native import ABI

CODE = """int kda_step_abi(void) { return ABI; }
int kda_step_launch(void *a) { return a == 0; }
int kda_step_shared_bytes(int bf16) { return bf16 ? 79248 : 112016; }
const char *kda_step_error(int code) { return code ? "some error" : "none"; }
"""
COMPILER = next((name for name in ("cc", "gcc", "g++") if shutil.which(name)), None)


def lay(folder: Path, library: bytes, architectures: Sequence[int] = (90, 100)) -> Path:
    """Write source, library and manifest as the build leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SOURCE).write_text("// the source\n")
    (folder / LIBRARY).write_bytes(library)
    manifest = {
        "schema": 1,
        "source": digest(sources(folder)),
        "library": sha256(library),
        "architectures": list(architectures),
        "nvcc": "13.0.88",
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def compiled(folder: Path, abi: int = ABI, code: str = CODE) -> bytes:
    """Return a shared library with the entries of step.cu."""
    assert COMPILER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step.c").write_text(code)
    out = folder / "step.so"
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", f"-DABI={abi}", "-o", out, folder / "step.c"], check=True
    )
    return out.read_bytes()
