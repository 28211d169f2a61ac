"""No rank joins a group of several nodes before it has shown the head that both run the same.

The ranks meet at the store that torch.distributed opens for them anyway, and leave there what they
run. Rank 0 owns the store, so it can tell a rank that is not there yet from one that came without
the overlay. Nothing else is opened, and nothing is asked twice.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any, NoReturn
from urllib.parse import urlsplit

from vllm_overlay.activate.failure import refuse
from vllm_overlay.activate.receipt import process_key
from vllm_overlay.activate.state import State
from vllm_overlay.activate.statement import differences, facts, run_record, told

PREFIX = "vllm-overlay/"
GO, NO = f"{PREFIX}go", f"{PREFIX}no"
QUIET = 1.0  # seconds before the first such line
POLL = 0.05  # seconds between two looks into the store
PROGRESS = 10.0  # seconds between two lines of who is missing
SILENT = 5.0  # seconds without a beat, after which a rank that waits here counts as gone
LINGER = 2.0  # seconds at most in which the other ranks read why the head refuses
HANDSHAKE = timedelta(seconds=30)
REMEDY = "make every node the same: recipe, fixes, image, environment; then start them again"


def guard(module: ModuleType, state: State) -> None:
    """Make vLLM's process group of a plan of several nodes begin with the comparison.

    ``module`` is vllm.distributed.parallel_state, which asks torch for the group.
    """
    distributed = sys.modules["torch.distributed"]
    if hasattr(distributed.init_process_group, "overlay_gate"):
        return
    original = distributed.init_process_group
    environment = module.init_distributed_environment

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if state.group is None:
            kwargs = meet(args, kwargs, state)
        return original(*args, **kwargs)

    def init_distributed_environment(*args: Any, **kwargs: Any) -> Any:
        result = environment(*args, **kwargs)
        if state.group is None:
            refuse("vLLM formed its process group past the comparison of the nodes")
        return result

    init_process_group.overlay_gate = True  # type: ignore[attr-defined]
    distributed.init_process_group = init_process_group  # type: ignore[attr-defined]
    module.init_distributed_environment = init_distributed_environment  # type: ignore[attr-defined]


def meet(args: tuple[Any, ...], kwargs: Mapping[str, Any], state: State) -> dict[str, Any]:
    """Compare this rank with the head's; return the arguments that join the group.

    Ends the process with 78 where they differ. ``kwargs`` are vLLM's of ``init_process_group``.
    """
    url = urlsplit(str(kwargs.get("init_method") or ""))
    if args or url.scheme != "tcp" or url.hostname is None or url.port is None:
        refuse(
            "the ranks of this node form a group that does not reach the head",
            expected="a rendezvous at tcp://HEAD:PORT",
            found=kwargs.get("init_method") or type(kwargs.get("store")).__name__,
            remedy="spread a model that is no mixture of experts by tensor or pipeline parallelism",
        )
    rank, world = int(kwargs["rank"]), int(kwargs["world_size"])
    timeout = kwargs.get("timeout") or sys.modules["torch.distributed"].default_pg_timeout
    mine = statement(state, rank, world)
    if rank == 0:
        store = open_store(url.hostname, url.port, world, master=True)
        start = lead(store, mine, world, state.plan["nodes"]["count"], port=url.port)
    else:
        state.told = True  # from here on the head knows of whatever this rank is refused for
        store, start = follow(url.hostname, url.port, mine, world)
    store.set_timeout(timeout)
    state.join(
        {"start": start, "rank": rank, "world": world, "host": url.hostname, "port": url.port}
    )
    prefixed = sys.modules["torch.distributed"].PrefixStore("default_pg", store)
    return {**kwargs, "init_method": None, "store": prefixed}


def statement(state: State, rank: int, world: int) -> dict[str, Any]:
    """Return what this rank leaves in the store."""
    pid, start = process_key()
    record = run_record(state.folder) or {}
    host = os.uname().nodename
    address = record.get("node", {}).get("address") or os.environ.get("VLLM_HOST_IP", "")
    environ = record.get("environment") or state.environment
    return {
        "rank": rank,
        "node": rank * state.plan["nodes"]["count"] // world,
        "host": f"{host} ({address})" if address else host,
        "address": address,
        "who": f"{host} {pid}-{start}",
        "pid": pid,
        "facts": facts(state.plan, environ),
    }


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


def lead(store: Any, mine: Mapping[str, Any], world: int, nodes: int, *, port: int) -> str:
    """Wait for every rank, compare each, and let them start; return the id of this start.

    Names who is missing every ten seconds, for as long as it takes. The first rank that differs
    ends the group.
    """
    head = Head(store, mine, world, nodes, port)
    store.set(_said(0), json.dumps(mine))
    progress, begun = Progress(), time.monotonic()
    while head.look():
        if time.monotonic() - begun > QUIET:
            progress.say(head.missing())
        progress.wait()
    start = uuid.uuid4().hex
    store.set(GO, json.dumps({"start": start, "roster": head.roster()}))
    return start


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
            if self.store.check([_refused(node)]):
                self.refused(json.loads(self.store.get(_refused(node))))
        for rank in range(1, self.world):
            if self.store.check([_said(rank)]):
                self.hear(rank, self.store.get(_said(rank)))
        if foreign:
            self.end(self.without_overlay(foreign))
        return len(self.ranks) < self.world

    def hear(self, rank: int, said: bytes) -> None:
        other = json.loads(said)
        beat = int(self.store.add(_beat(rank), 0))
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
        known = {key: self.mine["facts"].get(key, "unset") for key in other["facts"]}
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
            waiting = [_read(rank) for rank in self.ranks if rank]
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
        keys = ("rank", "node", "host", "address", "who", "pid")
        return [{key: self.ranks[rank][key] for key in keys} for rank in sorted(self.ranks)]


def follow(host: str, port: int, mine: Mapping[str, Any], world: int) -> tuple[Any, str]:
    """Meet the head, whenever it comes; return its store and the id of the start.

    A group that is complete without this process is another start's: it is left alone until its
    head is gone. Ends the process with 78 if it differs from the head, or the head refuses.
    """
    progress = Progress()
    while True:
        why = "nobody listens there"
        if reachable(host, port):
            try:
                store = open_store(host, port, world, master=False)
                start = _ask(store, mine, progress)
            except RuntimeError as error:  # torch's for a connection that ended
                why = f"it went away ({str(error).splitlines()[0][:100]})"
            else:
                if start is not None:
                    return store, start
                why = "its group is complete without this process, and has not ended yet"
        progress.say(f"rank {mine['rank']} is waiting for the head at {host}:{port}: {why}")
        progress.wait(10 * POLL)


def _ask(store: Any, mine: Mapping[str, Any], progress: Progress) -> str | None:
    """Show the head what this rank runs; return the id of the start, None if it is another's."""
    rank = mine["rank"]
    first = time.monotonic()
    while not store.check([_said(0)]):
        if store.num_keys() and time.monotonic() - first > SILENT:
            refuse(
                "the head runs without the overlay",
                expected="a head that shows its plan",
                found="a rendezvous of torch's alone",
                remedy="start the head with `vllm-overlay serve`",
            )
        progress.wait()
    head = json.loads(store.get(_said(0)))
    if store.check([GO]):
        return None
    _take_seat(store, mine, head, progress)
    found = differences(head["facts"], mine["facts"])
    if found:
        refuse(told(found, rank, mine["host"], head["host"]), remedy=REMEDY)
    while not store.check([GO]):
        if store.check([NO]):
            why = store.get(NO).decode()
            store.set(_read(rank), "")
            refuse(f"the head refuses the group: {why}")
        store.add(_beat(rank), 1)
        if time.monotonic() - first > QUIET:
            progress.say(f"rank {rank} is waiting for the other ranks, with {head['host']}")
        progress.wait()
    go = json.loads(store.get(GO))
    here = {item["rank"]: item["who"] for item in go["roster"]}
    return str(go["start"]) if here.get(rank) == mine["who"] else None


def _take_seat(
    store: Any, mine: Mapping[str, Any], head: Mapping[str, Any], progress: Progress
) -> None:
    """Leave this rank's statement, in the place of a dead process's but not of a live one's."""
    key = _said(mine["rank"])
    if store.check([key]):
        other = json.loads(store.get(key))
        beat = store.add(_beat(mine["rank"]), 0)
        deadline = time.monotonic() + 20 * POLL
        while other["who"] != mine["who"] and time.monotonic() < deadline:
            progress.wait()
            if store.add(_beat(mine["rank"]), 0) != beat:
                refuse(
                    f"rank {mine['rank']} is taken",
                    found=f"{other['host']} has it already, and waits with {head['host']}",
                    expected="a NODE_RANK of its own on every node",
                    remedy=f"set another NODE_RANK on {mine['host']} or on {other['host']}",
                )
    store.add(_beat(mine["rank"]), 1)
    store.set(key, json.dumps(mine))


class Progress:
    """Says a line when it changes, and again every ten seconds; sleeps between two looks."""

    def __init__(self) -> None:
        self._last = ""
        self._at = 0.0
        self._parent = os.getppid()

    def say(self, text: str) -> None:
        now = time.monotonic()
        if text != self._last or now - self._at > PROGRESS:
            os.write(2, f"vllm-overlay: {text}\n".encode(errors="replace"))
            self._last, self._at = text, now

    def wait(self, seconds: float = POLL) -> None:
        """Sleep, unless whoever started this process is gone: nobody would end it any more."""
        if os.getppid() != self._parent:
            os._exit(1)
        time.sleep(seconds)


def tell(
    host: str, port: int, node: int, line: str, facts: Mapping[str, str], patience: float
) -> bool:
    """Leave word with the head that a node cannot come, and why; return whether it was left.

    ``facts`` are those of the node, as far as it has them; ``patience`` are seconds.
    """
    import torch.distributed  # noqa: F401

    own, progress = os.uname().nodename, Progress()
    word = json.dumps({"node": node, "host": own, "line": line, "facts": dict(facts)})
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if reachable(host, port):
            try:
                store = open_store(host, port, 1, master=False)
                if store.check([_said(0)]) and not store.check([GO]):
                    store.set(_refused(node), word)
                    return bool(store.get(_refused(node)))
            except RuntimeError:
                pass
        progress.wait(10 * POLL)
    return False


def reachable(host: str, port: int) -> bool:
    """Whether something listens there. torch's own attempt would fill the log with its failures."""
    try:
        with socket.create_connection((host, port), timeout=HANDSHAKE.total_seconds()):
            return True
    except OSError:
        return False


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


def _said(rank: int) -> str:
    return f"{PREFIX}said/{rank}"


def _beat(rank: int) -> str:
    return f"{PREFIX}beat/{rank}"


def _read(rank: int) -> str:
    return f"{PREFIX}read/{rank}"


def _refused(node: int) -> str:
    return f"{PREFIX}refused/{node}"
