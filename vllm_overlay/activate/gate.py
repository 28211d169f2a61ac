"""No rank joins a group of several nodes before it has shown the head that both run the same.

The ranks meet at the store that torch.distributed opens for them anyway, and leave there what they
run. Rank 0 owns the store, so it can tell a rank that is not there yet from one that came without
the overlay. Nothing else is opened, and nothing is asked twice.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from vllm_overlay.activate.failure import refuse
from vllm_overlay.activate.head import lead
from vllm_overlay.activate.meeting import (
    GO,
    NO,
    POLL,
    QUIET,
    REMEDY,
    SILENT,
    Progress,
    beat_key,
    open_store,
    reachable,
    read_key,
    refused_key,
    said_key,
)
from vllm_overlay.activate.receipt import fix_states, process_key
from vllm_overlay.activate.state import State
from vllm_overlay.activate.statement import (
    differences,
    facts,
    family_state,
    run_record,
    told,
)
from vllm_overlay.kda.native import identity


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
        if not joined(state):
            kwargs = meet(args, kwargs, state)
        return original(*args, **kwargs)

    def init_distributed_environment(*args: Any, **kwargs: Any) -> Any:
        result = environment(*args, **kwargs)
        if not joined(state):
            refuse("vLLM formed its process group past the comparison of the nodes")
        return result

    init_process_group.overlay_gate = True  # type: ignore[attr-defined]
    distributed.init_process_group = init_process_group  # type: ignore[attr-defined]
    module.init_distributed_environment = init_distributed_environment  # type: ignore[attr-defined]


def joined(state: State) -> bool:
    """Whether this rank is past the comparison."""
    return state.group is not None and "start" in state.group


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
    state.told = True  # from here on the head knows of whatever a rank is refused for
    progress = Progress(lambda line: state.join({"waiting": line}))
    group: dict[str, Any] = {"rank": rank, "world": world, "host": url.hostname, "port": url.port}
    if rank == 0:
        store = open_store(url.hostname, url.port, world, master=True)
        start, group["roster"] = lead(
            store, mine, world, state.plan["nodes"]["count"], url.port, progress
        )
    else:
        store, start = follow(url.hostname, url.port, mine, world, progress)
    store.set_timeout(timeout)
    state.join({**group, "start": start})
    prefixed = sys.modules["torch.distributed"].PrefixStore("default_pg", store)
    return {**kwargs, "init_method": None, "store": prefixed}


def statement(state: State, rank: int, world: int) -> dict[str, Any]:
    """Return what this rank leaves in the store."""
    pid, start = process_key()
    record = run_record(state.folder) or {}
    host = os.uname().nodename
    address = record.get("node", {}).get("address") or os.environ.get("VLLM_HOST_IP", "")
    environ = record.get("environment") or state.environment
    states = fix_states(state.plan, state.applied, state.notes)
    return {
        "rank": rank,
        "node": rank * state.plan["nodes"]["count"] // world,
        "host": f"{host} ({address})" if address else host,
        "address": address,
        "who": f"{host} {pid}-{start}",
        "pid": pid,
        "fixes": {fix["name"]: fix["state"] for fix in states},
        "facts": {
            **facts(state.plan, environ),
            # What `kda.native` loads depends on files and devices, which no plan knows.
            "kda.library": identity(),
            "processes": family_state(state.folder),
        },
    }


def follow(
    host: str, port: int, mine: Mapping[str, Any], world: int, progress: Progress
) -> tuple[Any, str]:
    """Meet the head, whenever it comes; return its store and the id of the start.

    A group that is complete without this process is another start's: it is left alone until its
    head is gone. Ends the process with 78 if it differs from the head, or the head refuses.
    """
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
    while not store.check([said_key(0)]):
        if store.num_keys() and time.monotonic() - first > SILENT:
            refuse(
                "the head runs without the overlay",
                expected="a head that shows its plan",
                found="a rendezvous of torch's alone",
                remedy="start the head with `vllm-overlay serve`",
            )
        progress.wait()
    head = json.loads(store.get(said_key(0)))
    if store.check([GO]):
        return None
    _take_seat(store, mine, head, progress)
    found = differences(head["facts"], mine["facts"])
    if found:
        refuse(told(found, rank, mine["host"], head["host"]), remedy=REMEDY)
    while not store.check([GO]):
        if store.check([NO]):
            why = store.get(NO).decode()
            store.set(read_key(rank), "")
            refuse(f"the head refuses the group: {why}")
        store.add(beat_key(rank), 1)
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
    key = said_key(mine["rank"])
    if store.check([key]):
        other = json.loads(store.get(key))
        beat = store.add(beat_key(mine["rank"]), 0)
        deadline = time.monotonic() + 20 * POLL
        while other["who"] != mine["who"] and time.monotonic() < deadline:
            progress.wait()
            if store.add(beat_key(mine["rank"]), 0) != beat:
                refuse(
                    f"rank {mine['rank']} is taken",
                    found=f"{other['host']} has it already, and waits with {head['host']}",
                    expected="a NODE_RANK of its own on every node",
                    remedy=f"set another NODE_RANK on {mine['host']} or on {other['host']}",
                )
    store.add(beat_key(mine["rank"]), 1)
    store.set(key, json.dumps(mine))


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
                if store.check([said_key(0)]) and not store.check([GO]):
                    store.set(refused_key(node), word)
                    return bool(store.get(refused_key(node)))
            except RuntimeError:
                pass
        progress.wait(10 * POLL)
    return False
