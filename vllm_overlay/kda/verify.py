"""The verify that folds: its operands are checked here, and its form is chosen."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vllm_overlay.activate.notes import note
from vllm_overlay.kda import native
from vllm_overlay.kda.chunk import verify_chunk
from vllm_overlay.kda.operands import Folds, Records, Window, check
from vllm_overlay.kda.sequential import verify_sequential

Verify = Callable[[Window, Tensor, Records, Tensor, int, Folds, Tensor], Tensor]

# Rows x heads from which the chunk kernels are the faster (bench/kda_deferred.py, H200, fp32
# states): so at 64 x 16, as fast at 12 x 64 and 64 x 8; at 12 x 16 the sequential kernel is.
CHUNK_FROM = 768


def triton_form(rows: int, heads: int) -> Verify:
    """Return the faster Triton verify of a launch's ``rows`` (a captured graph's padding too)."""
    return verify_chunk if rows * heads >= CHUNK_FROM else verify_sequential


def form_for(
    window: Window, state: Tensor, records: Records, out: Tensor
) -> tuple[Verify, str, str]:
    """Return the CUDA library's verify if there is one for such operands, else a Triton one.

    With it what a receipt says: ``kernel``, and ``cuda sm_90 0123456789ab`` or ``triton: why``. Of
    operands that the library has no kernel for, ``kernel where unfit``: others may come.
    """
    device = window.q.device
    library, form = native.library(device), native.form(device)
    if library is None:
        return triton_form(window.rows, window.heads), "kernel", form
    misfit = library.misfit(window, state, records, out)
    if not misfit:
        return library.fold_verify, "kernel", form
    why = f"triton: no kernel in {library.path.name} for {misfit}"
    return triton_form(window.rows, window.heads), "kernel where unfit", why


def fold_verify(
    window: Window,
    state: Tensor,
    records: Records,
    write_rows: Tensor,
    scratch_row: int,
    folds: Folds,
    out: Tensor,
    *,
    fix: str | None = None,
) -> Tensor:
    """Fold each row's pending tokens into its state, write it, verify its window; return ``out``.

    ``state`` [blocks, heads, V, K] float32 or bfloat16, a block's in one piece. A token does
    state *= decay; u = sigmoid(beta) * (v - state @ unit(k)); state += u k^T, and its output is
    state @ (unit(q) * K**-0.5), with unit(x) = x * rsqrt(sum(x * x) + 1e-6). After the fold the
    state is rounded to its type and written; a fold of 0 tokens leaves it untouched. What the
    window does to it is only recorded, in record row ``write_rows[row]``, int32, or in
    ``scratch_row`` if that is negative. ``out`` [1, tokens, heads, V].

    A record row that is read must not be written by the same launch, ``scratch_row`` apart, which
    nobody reads. K is a power of two and V a multiple of 16. The form that was taken stands in the
    process's receipt, as a note of ``fix`` if one is named.

    Raises ValueError for shapes, strides or types that do not fit.
    """
    check(window, state, records, write_rows, folds, out)
    if window.tokens == 0:
        return out
    verify, key, form = form_for(window, state, records, out)
    if fix is not None:
        note(fix, key, form)
    return verify(window, state, records, write_rows, scratch_row, folds, out)
