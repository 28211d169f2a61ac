"""Loads the CUDA library for a device, or says why Triton is used. torch only inside functions.

The library is a plain C one: ctypes calls it, and no release of torch matters to it.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vllm_overlay.kda.files import FOLDER, NoLibrary, read

ABI = 1  # what kda_step_abi() of step.cu must return


class Arguments(ctypes.Structure):
    """What kda_step_launch takes, field by field as in step.cu."""

    _fields_ = ()


@dataclass(frozen=True)
class Native:
    """A loaded library; ``arch`` is the code that the device runs: sm_90, or compute_100 (PTX)."""

    path: Path
    sha256: str
    arch: str
    handle: ctypes.CDLL = field(repr=False, compare=False)

    def fold_verify(
        self,
        window: Any,
        state: Any,
        records: Any,
        write_rows: Any,
        scratch_row: int,
        folds: Any,
        out: Any,
    ) -> Any:
        """Fold and verify as ``verify.fold_verify`` does."""
        raise NotImplementedError


@cache
def look(capability: tuple[int, int], folder: Path) -> Native | str:
    """Return the library of a folder for a GPU of that compute capability, or why there is none.

    Looked for once in each process: what changes on disk later does not change what runs.
    """
    try:
        built = read(folder)
        arch = built.code_for(capability)
        return Native(built.path, built.sha256, arch, _load(built.path))
    except NoLibrary as error:
        return str(error)


def _load(path: Path) -> ctypes.CDLL:
    try:
        handle = ctypes.CDLL(str(path))
        abi, _ = handle.kda_step_abi, handle.kda_step_launch
    except (OSError, AttributeError) as error:
        raise NoLibrary(f"{path} cannot be loaded: {error}") from None
    abi.restype, abi.argtypes = ctypes.c_int, ()
    found = abi()
    if found != ABI:
        raise NoLibrary(f"{path} has ABI {found}, and {ABI} is wanted: build it again")
    return handle


def _look_for(device: Any) -> Native | str:
    import torch

    kind = torch.device(device).type
    if kind != "cuda" or torch.version.cuda is None:
        return f"no CUDA library for {kind if torch.version.hip is None else 'ROCm'}"
    return look(torch.cuda.get_device_capability(device), FOLDER)


def library(device: Any) -> Native | None:
    """Return the library for a torch device, or None: ``form`` says why."""
    found = _look_for(device)
    return None if isinstance(found, str) else found


def form(device: Any) -> str:
    """Return what a device runs, for a receipt: ``cuda sm_90 0123456789ab`` or ``triton: why``."""
    found = _look_for(device)
    return (
        f"triton: {found}" if isinstance(found, str) else f"cuda {found.arch} {found.sha256[:12]}"
    )


def identity() -> str:
    """Return the sha256 of the library that this process would run, or ``none``.

    For its current GPU, if torch has one in use here; else for any. Imports no torch.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found = library("cuda")
        return found.sha256 if found else "none"
    try:
        return read(FOLDER).sha256
    except NoLibrary:
        return "none"
