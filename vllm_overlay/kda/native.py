"""The CUDA form of the fused verify: a library built with the image, if there is one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from vllm_overlay.kda.operands import Folds, Records, Window


class Native(Protocol):
    """A loaded library for one device's architecture."""

    def takes(self, window: Window) -> bool:
        """Tell whether the library has a kernel for such a window."""

    def fold_verify(
        self,
        window: Window,
        state: Tensor,
        records: Records,
        write_rows: Tensor,
        scratch_row: int,
        folds: Folds,
        out: Tensor,
    ) -> Tensor:
        """``verify.fold_verify`` by the library, its operands checked."""


def library(device: object) -> Native | None:
    """Return the library for ``device``, or None where there is none."""
    return None
