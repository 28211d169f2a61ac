"""Where the ranks of several nodes meet: the store of torch.distributed, and the keys in it."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

PREFIX = "vllm-overlay/"
GO, NO = f"{PREFIX}go", f"{PREFIX}no"
QUIET = 1.0  # seconds before the first such line
POLL = 0.05  # seconds between two looks into the store
PROGRESS = 10.0  # seconds between two lines of who is missing
SILENT = 5.0  # seconds without a beat, after which a rank that waits here counts as gone
LINGER = 2.0  # seconds at most in which the other ranks read why the head refuses
HANDSHAKE = timedelta(seconds=30)
REMEDY = "make every node the same: recipe, fixes, image, environment; then start them again"


def open_store(host: str, port: int, world: int, *, master: bool) -> Any:
    """Return the store of the group; only the head waits for no one here."""
    return sys.modules["torch.distributed"].TCPStore(
        host_name=host,
        port=port,
        world_size=world,
        is_master=master,
        timeout=HANDSHAKE,
        wait_for_workers=False,
        multi_tenant=True,
    )


class Progress:
    """Says a line when it changes, and again every ten seconds; sleeps between two looks.

    ``note`` gets each line that is new: it ends up in the receipt.
    """

    def __init__(self, note: Callable[[str], None] = lambda line: None) -> None:
        self._note = note
        self._last = ""
        self._at = 0.0
        self._parent = os.getppid()

    def say(self, text: str) -> None:
        """Show the line, unless it was shown within the last ten seconds."""
        now = time.monotonic()
        if text != self._last or now - self._at > PROGRESS:
            os.write(2, f"vllm-overlay: {text}\n".encode(errors="replace"))
            if text != self._last:
                self._note(text)
            self._last, self._at = text, now

    def wait(self, seconds: float = POLL) -> None:
        """Sleep, unless whoever started this process is gone: nobody would end it any more."""
        if os.getppid() != self._parent:
            os._exit(1)
        time.sleep(seconds)


def reachable(host: str, port: int) -> bool:
    """Whether something listens there. torch's own attempt would fill the log with its failures."""
    try:
        with socket.create_connection((host, port), timeout=HANDSHAKE.total_seconds()):
            return True
    except OSError:
        return False


def said_key(rank: int) -> str:
    """Return the key under which a rank shows what it runs."""
    return f"{PREFIX}said/{rank}"


def beat_key(rank: int) -> str:
    """Return the key of the counter that a waiting rank raises."""
    return f"{PREFIX}beat/{rank}"


def read_key(rank: int) -> str:
    """Return the key that a rank sets once it has read why the head refuses."""
    return f"{PREFIX}read/{rank}"


def refused_key(node: int) -> str:
    """Return the key under which a node leaves why it cannot come."""
    return f"{PREFIX}refused/{node}"
