"""Which verify rows must not defer their commit under prefix caching. Imports no vLLM."""

from __future__ import annotations

import torch


def near_boundary(
    ends: torch.Tensor, query_lens: torch.Tensor, block: int, window: int
) -> torch.Tensor:
    """Return bool [rows]: this step or the next may bring the row to a block boundary.

    ``ends`` [rows] are the host's upper bounds of the sequence lengths after this step, drafts
    included; ``query_lens`` [rows] the tokens of this step; ``block`` the tokens of a state block;
    ``window`` the longest query. Host integers.

    At a boundary the state is stored under a prefix-cache key and carried into the next block, so
    it must be committed there. A bound may be too high by the rejected drafts of the steps whose
    result the host has not seen, and the next step adds a window: two windows on either side.
    """
    margin = 2 * window
    low = ends.to(torch.int64) - query_lens.to(torch.int64) - margin
    high = ends.to(torch.int64) + margin
    return (low < 0) | (low.clamp(min=0) // block != high // block)
