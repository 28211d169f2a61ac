"""The one way in which activation fails: a line on standard error and exit status 78."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing typing costs more than the rest of the start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

EXIT_CONFIG = 78

# What else happens at a failure: it is recorded beside the plan, and the main process ends its
# children, which vLLM would have done on its own way out.
on_failure: list[Callable[[str], None]] = []


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
    ``except Exception``, and would go on without the patch. Nothing on the way may raise, and
    nothing is flushed: a full pipe would keep the process.
    """
    try:
        named = (
            ("fix", fix),
            ("module", module),
            ("expected", expected),
            ("found", found),
            ("remedy", remedy),
        )
        text = "; ".join(
            [what, *(f"{name}: {value}" for name, value in named if value is not None)]
        )
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        os.write(2, f"vllm-overlay: pid {os.getpid()}: {line}\n".encode(errors="replace"))
        for act in on_failure:
            act(line)
    finally:
        os._exit(EXIT_CONFIG)
