"""The one way in which activation fails: a line on standard error and exit status 78."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing costs more than the rest of the start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

EXIT_CONFIG = 78

# Set once the plan is read: records the failure beside the plan, for `status` and `health`.
recorder: Callable[[str], None] | None = None


def refuse(
    what: str,
    *,
    fix: str | None = None,
    module: str | None = None,
    expected: object = None,
    found: object = None,
    remedy: str | None = None,
) -> NoReturn:
    """End this process with status 78 and one line: fix, module, expected, found, remedy.

    ``os._exit`` and not an exception: vLLM wraps imports in ``except ImportError`` and
    ``except Exception``, and would go on without the patch.
    """
    named = (
        ("fix", fix),
        ("module", module),
        ("expected", expected),
        ("found", found),
        ("remedy", remedy),
    )
    parts = [what, *(f"{name}: {value}" for name, value in named if value is not None)]
    text = "; ".join(parts)
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    try:
        if recorder is not None:
            recorder(line)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            pass  # the streams may be closed or missing; the line goes to the descriptor
        try:
            os.write(2, f"vllm-overlay: pid {os.getpid()}: {line}\n".encode())
        finally:
            os._exit(EXIT_CONFIG)
