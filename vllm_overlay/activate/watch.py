"""Lets the nodes of a group live and die together: a thread of each node's main process.

vLLM's nodes do not watch each other: a worker waits for ever for a head that is gone, and a head
notices a dead worker with the next request at the earliest. Here each main process leaves a pulse,
and what its processes have applied, in the store that the ranks have met at.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from vllm_overlay.activate.family import descendants, end_children
from vllm_overlay.activate.meeting import PREFIX, open_store, reachable
from vllm_overlay.activate.receipt import process_key, write_atomic
from vllm_overlay.activate.state import State

BEAT = 1.0  # seconds between two pulses
SILENCE = 20.0  # seconds without one, after which a node counts as lost
ROWS = 5  # beats between two looks at this node's processes
GOODBYE = 30.0  # seconds in which vLLM ends by itself, once it is told to
EXIT_LOST = 1

STOPPED, DIED = "stopped", "died"


class Watch:
    """One node's view of the others. ``node`` is of the run record: rank, count, head, port."""

    def __init__(self, state: State, node: Mapping[str, Any]) -> None:
        self.state, self.node = state, node
        self.rank: int = node["rank"]
        self.count: int = node["count"]
        self.stopping = threading.Event()  # this node was asked to end
        self.joined = threading.Event()
        self.head_stops = False
        self.lost: str | None = None
        self.ending = False  # this node ends because the group has
        self.heard = time.monotonic()
        self.pulses: dict[int, tuple[int, float]] = {}
        self.others: dict[int, Any] = {}  # the rows of the other nodes
        self._store: Any = None
        self._listener: threading.Thread | None = None

    def start(self) -> None:
        """Start both threads: one that talks, and one that notices when that hangs."""
        for target in (self._talk, self._mind):
            threading.Thread(target=target, daemon=True, name="overlay-watch").start()

    def leave(self) -> None:
        """Called as this process ends: an end that nobody asked for is a failure of the group."""
        if self.ending:
            os._exit(EXIT_LOST)
        if self.joined.is_set() and not self.stopping.is_set():
            self._goodbye(DIED)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_LOST)

    def _talk(self) -> None:
        try:
            group = self._wait_for_group()
            import torch.distributed  # noqa: F401

            if not reachable(group["host"], group["port"]):
                raise RuntimeError("the head went as soon as the group was whole")
            self._store = open_store(group["host"], group["port"], group["world"], master=False)
            self.heard = time.monotonic()
            self.joined.set()
            if self.rank:
                self._listener = threading.Thread(target=self._listen, daemon=True)
                self._listener.start()
            beat = 0
            while not self.stopping.wait(BEAT if beat else 0) and not self.head_stops:
                self._beat(beat, group)
                self.heard = time.monotonic()
                beat += 1
        except Exception as error:  # torch's RuntimeError for a connection that ended, above all
            self.lost = _first_line(error)
            self.joined.set()

    def _listen(self) -> None:
        """Wait for the head's word that it stops: if it comes, it comes before the store goes."""
        try:
            self._store.clone().wait([_key(STOPPED, 0)], timedelta(days=3650))
            self.head_stops = True
        except RuntimeError as error:
            self.lost = self.lost or _first_line(error)

    def stop(self) -> None:
        """Note that this node was asked to end, and let the others know before it does."""
        if not self.stopping.is_set():
            self.stopping.set()
            if self.joined.is_set():
                self._goodbye(STOPPED)

    def _wait_for_group(self) -> dict[str, Any]:
        """Return the group that a process of this node has joined, once there is one."""
        while True:
            for pid, start in descendants(os.getpid()):
                try:
                    with open(f"{self.state.folder}/receipts/{pid}-{start}.json") as file:
                        group = json.load(file).get("group") or {}
                except (OSError, ValueError):
                    continue
                if "start" in group:
                    found: dict[str, Any] = group
                    return found
            time.sleep(BEAT / 2)

    def _beat(self, beat: int, group: Mapping[str, Any]) -> None:
        store = self._store
        store.add(f"{PREFIX}pulse/{self.rank}", 1)
        news = beat % ROWS == 0
        if news:
            store.set(f"{PREFIX}rows/{self.rank}", json.dumps(self._own_rows()))
        if self.rank:
            return
        for node in range(1, self.count):
            news = self._look_at(node) or news
        if news:
            self._write(group["start"])

    def _own_rows(self) -> list[dict[str, Any]]:
        from pathlib import Path

        from vllm_overlay.cluster import own_rows
        from vllm_overlay.errors import ConfigError

        run = {"pid": os.getpid(), "node": self.node}
        try:
            return own_rows(Path(self.state.folder), run)
        except (OSError, ConfigError):
            return []  # which the head shows as missing; the group goes on

    def _write(self, start: str) -> None:
        """Write what the head knows of the other nodes, for `status` and `health`."""
        own = "-".join(map(str, process_key()))
        record = {"schema": 1, "start": start, "at": time.time(), "nodes": self.others}
        try:
            write_atomic(f"{self.state.folder}/cluster/{own}.json", record)
        except OSError:
            pass  # what is there grows old, and `health` says so

    def _look_at(self, node: int) -> bool:
        """Read what another node has left, and return whether its rows are new.

        A node that has ended, or is silent, is lost.
        """
        store, now = self._store, time.monotonic()
        pulse = int(store.add(f"{PREFIX}pulse/{node}", 0))
        if self.pulses.get(node, (-1, 0.0))[0] != pulse:
            self.pulses[node] = (pulse, now)
        old = self.others.get(node)
        if store.check([f"{PREFIX}rows/{node}"]):
            self.others[node] = json.loads(store.get(f"{PREFIX}rows/{node}"))
        if store.check([_key(STOPPED, node)]):
            self.lost = f"node {node} has been stopped"
        elif store.check([_key(DIED, node)]):
            self.lost = f"node {node} has died"
        elif now - self.pulses[node][1] > SILENCE:
            self.lost = f"node {node} has been silent for {SILENCE:g} s"
        return bool(self.others.get(node) != old)

    def _goodbye(self, how: str) -> None:
        """Leave word of this node's end, and wait until it is there: the store may go with us."""
        if self._store is None:
            return
        try:
            self._store.set(_key(how, self.rank), "")
            self._store.get(_key(how, self.rank))
        except RuntimeError:
            pass  # the store went first

    def _mind(self) -> None:
        self.joined.wait()
        while not self.stopping.wait(BEAT / 2):
            if self.head_stops:
                if not reachable(self.node["head"], self.node["port"]):
                    self._end()
            elif self.lost is None and time.monotonic() - self.heard > SILENCE:
                self.lost = f"the head has not answered for {SILENCE:g} s"
            elif self.lost is not None:
                self._end()

    def _end(self) -> None:
        """End this node: in vLLM's own way after a head that was stopped, else at once."""
        if self._listener is not None:
            self._listener.join(BEAT)  # the head's word may have come with the end of its store
        self.ending = not self.head_stops
        if self.head_stops:
            say("the head was stopped; this node follows")
            os.kill(os.getpid(), signal.SIGTERM)
            self._after(GOODBYE, 0)
        say(f"the group has ended ({self.lost}); this node ends, to begin anew")
        line = f"the group of {self.count} nodes has ended: {self.lost}"
        self.state.record_failure(line, lost=True)
        end_children()
        os._exit(EXIT_LOST)

    def _after(self, seconds: float, status: int) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(BEAT / 2)
        end_children()
        os._exit(status)


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0][:100]


def _key(how: str, node: int) -> str:
    return f"{PREFIX}{how}/{node}"


def say(line: str) -> None:
    """Write a line on standard error; nothing is buffered there."""
    os.write(2, f"vllm-overlay: {line}\n".encode(errors="replace"))


def note_stops(stop: Callable[[], None]) -> None:
    """Call ``stop`` first when this process is asked to end, whatever handler vLLM installs.

    Only the handler knows that the end was asked for: at the end itself it looks like a crash.
    """
    original = signal.signal

    def install(number: int, handler: Any) -> Any:
        if number not in (signal.SIGTERM, signal.SIGINT) or not callable(handler):
            return original(number, handler)

        def noted(*args: Any) -> Any:
            stop()
            return handler(*args)

        return original(number, noted)

    signal.signal = install  # type: ignore[assignment]


def begin(state: State, node: Mapping[str, Any]) -> Watch:
    """Watch the other nodes from this main process."""
    watch = Watch(state, node)
    note_stops(watch.stop)
    watch.start()
    return watch
