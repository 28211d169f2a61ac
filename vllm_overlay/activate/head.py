"""The head of several nodes: waits for every rank, compares each, and lets them start."""

from __future__ import annotations

import json
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any, NoReturn

from vllm_overlay.activate.failure import refuse
from vllm_overlay.activate.meeting import (
    GO,
    LINGER,
    NO,
    POLL,
    PREFIX,
    QUIET,
    REMEDY,
    SILENT,
    Progress,
    beat_key,
    read_key,
    refused_key,
    said_key,
)
from vllm_overlay.activate.statement import UNSET, differences, told


def lead(
    store: Any, mine: Mapping[str, Any], world: int, nodes: int, port: int, progress: Progress
) -> tuple[str, list[dict[str, Any]]]:
    """Wait for every rank, compare each, and let them start; return this start's id and roster.

    Names who is missing every ten seconds, for as long as it takes. The first rank that differs
    ends the group.
    """
    head = Head(store, mine, world, nodes, port)
    store.set(said_key(0), json.dumps(mine))
    begun = time.monotonic()
    while head.look():
        if time.monotonic() - begun > QUIET:
            progress.say(head.missing())
        progress.wait()
    start = uuid.uuid4().hex
    roster = head.roster()
    store.set(GO, json.dumps({"start": start, "roster": roster}))
    return start, roster


class Head:
    """What the head has seen of the other ranks."""

    def __init__(
        self, store: Any, mine: Mapping[str, Any], world: int, nodes: int, port: int
    ) -> None:
        self.store, self.mine, self.world, self.nodes, self.port = store, mine, world, nodes, port
        self.ranks: dict[int, dict[str, Any]] = {0: dict(mine)}
        self.beats: dict[int, tuple[int, float]] = {}

    def look(self) -> bool:
        """Look once; return whether someone is missing. Ends the process over a difference."""
        foreign = self.foreign()
        for node in range(1, self.nodes):
            if self.store.check([refused_key(node)]):
                self.refused(json.loads(self.store.get(refused_key(node))))
        for rank in range(1, self.world):
            if self.store.check([said_key(rank)]):
                self.hear(rank, self.store.get(said_key(rank)))
        if foreign:
            self.end(self.without_overlay(foreign))
        return len(self.ranks) < self.world

    def hear(self, rank: int, said: bytes) -> None:
        other = json.loads(said)
        beat = int(self.store.add(beat_key(rank), 0))
        now = time.monotonic()
        if self.beats.get(rank, (-1, 0.0))[0] != beat:
            self.beats[rank] = (beat, now)
        if now - self.beats[rank][1] > SILENT:  # it left while the head waited for others
            self.ranks.pop(rank, None)
            return
        if self.ranks.get(rank, {}).get("who") == other["who"]:
            return
        found = differences(self.mine["facts"], other["facts"])
        if found:
            self.end(told(found, rank, other["host"], self.mine["host"]))
        self.ranks[rank] = other

    def refused(self, other: Mapping[str, Any]) -> NoReturn:
        """A node that could not come this far has left word."""
        known = {key: self.mine["facts"].get(key, UNSET) for key in other["facts"]}
        found = differences(known, other["facts"])
        if not found:
            found = [("its overlay", "active", f"refused ({other['line']})")]
        rank = other["node"] * self.world // self.nodes
        self.end(told(found, rank, other["host"], self.mine["host"]))

    def foreign(self) -> list[str]:
        """Return the keys of processes that joined without asking here; '' for unnamed ones."""
        count = self.store.num_keys()
        names = self.store.list_keys()
        others = [name for name in names if not name.startswith(PREFIX)]
        # torch's own count of who connected has no name; what came since the count is no matter.
        return others or [""] * (count > len(names))

    def without_overlay(self, keys: list[str]) -> str:
        last = keys[0].rsplit("/", 1)[-1]
        absent = [rank for rank in range(self.world) if rank not in self.ranks]
        ranks = [int(last)] if last.isdecimal() and int(last) in absent else absent
        known = {item["address"] for item in self.ranks.values()}
        hosts = [peer for peer in peers(self.port) if peer not in known] or ["an unknown host"]
        named = " or ".join(map(str, ranks)) or "?"
        found = [("the overlay", "active", "absent: it was started without a plan")]
        return told(found, named, " or ".join(hosts), self.mine["host"])

    def end(self, line: str) -> NoReturn:
        """Tell the other ranks why, then end."""
        try:
            self.store.set(NO, line)
            deadline = time.monotonic() + LINGER
            waiting = [read_key(rank) for rank in self.ranks if rank]
            while waiting and not self.store.check(waiting) and time.monotonic() < deadline:
                time.sleep(POLL)
        finally:
            refuse(line, remedy=REMEDY)

    def missing(self) -> str:
        share = self.world // self.nodes
        absent = [rank for rank in range(self.world) if rank not in self.ranks]
        named = ", ".join(f"{rank} (node {rank // share})" for rank in absent)
        here = ", ".join(f"{rank} on {item['host']}" for rank, item in sorted(self.ranks.items()))
        return f"waiting for rank {named} of {self.world}; here: rank {here}"

    def roster(self) -> list[dict[str, Any]]:
        """Return who belongs to the group, by rank."""
        keys = ("rank", "node", "host", "address", "who", "pid", "fixes")
        return [{key: self.ranks[rank][key] for key in keys} for rank in sorted(self.ranks)]


def peers(port: int) -> list[str]:
    """Return the addresses that are connected to a port of this machine."""
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            with open(f"/proc/self/net/{name}") as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        for row in rows:
            if row[3] == "01" and int(row[1].rpartition(":")[2], 16) == port:
                text = row[2].partition(":")[0]
                words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
                raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
                found.add(socket.inet_ntop(family, raw).removeprefix("::ffff:"))
    return sorted(found)
