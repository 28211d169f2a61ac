"""What a fix says of its choices at run time: it stands in the receipt of the process."""

from __future__ import annotations

from vllm_overlay.activate import current


def note(fix: str, key: str, value: str) -> None:
    """Record what a fix chose in this process; the last value of a key stands.

    Cheap where nothing changes, so that each layer may call it. Without a plan, as where a test
    runs a fix's code alone, there is no receipt and nothing to do. Raises ValueError for a fix that
    the plan does not apply, and ends the process (78) if the receipt cannot be written.
    """
    state = current()
    if state is not None:
        state.note(fix, key, value)
