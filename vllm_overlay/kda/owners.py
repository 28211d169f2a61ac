"""Which request owns a slot of the V2 model runner. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Any


class Owners:
    """The slots of requests, and the request that was removed last.

    A request that streams more input is removed and at once added anew, maybe to another slot, and
    keeps its blocks: what is pending of its old slot belongs to them. Any other request that comes
    back, after a preemption say, has its state computed anew.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._left: tuple[str, int] | None = None

    def leave(self, request: str) -> None:
        """Note that a request is removed; it need not be there."""
        slot = self._slots.pop(request, None)
        self._left = None if slot is None else (request, slot)

    def enter(self, request: str, slot: int) -> int | None:
        """Note a request's slot; return the one that it has left just now, if it has."""
        left, self._left = self._left, None
        self._slots[request] = slot
        return left[1] if left is not None and left[0] == request else None


def is_dummy(input_batch: Any) -> bool:
    """Tell whether no row of a vLLM ``InputBatch`` has a prompt.

    Warm-ups and piecewise captures use the slots 0, 1, ... of requests that may exist, and are not
    announced as captures.
    """
    prompts = getattr(input_batch, "prefill_len_np", None)
    return prompts is not None and not prompts.any()
