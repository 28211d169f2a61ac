"""Ranks of a group: a process each, a real store of torch's, no engine."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from setproctitle import setproctitle

from tests.support.node import wait_for
from tests.support.serving import free_port
from vllm_overlay.activate.receipt import process_key, write_atomic
from vllm_overlay.plan import Plan, PlannedFix, write_plan

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["torch.distributed", "vllm_overlay.activate.gate"])

FIX = PlannedFix("a-fix", "apply", "VLLM_A_FIX", "1", "recipe", (), (), "1" * 64)
PLAN = Plan(
    cache_key="0123456789abcdef",
    recipe={"name": "test", "file": "test.yaml", "variant": None},
    folders={},
    vllm={"version": "9.9.0", "path": "/vllm", "torch": "2"},
    model="m",
    served_model="m",
    serve={"max-num-seqs": 16},
    env={"VLLM_A_FIX": "1"},
    fixes=(FIX,),
    overrides=(),
    requires={},
    smoke={},
    modules={},
    nodes={"count": 2, "build": "b" * 64},
)


def own_address() -> tuple[str, str]:
    """Return (interface, IPv4 address) of this machine that is not the loopback's."""
    for name, addresses in psutil.net_if_addrs().items():
        for item in addresses:
            if item.family == socket.AF_INET and not item.address.startswith("127."):
                return name, item.address
    pytest.skip("this machine has the loopback interface alone")


def join(
    plan: str, rank: int, world: int, port: int, env: Mapping[str, str], log: str, overlay: bool
) -> None:
    """Form the group as vLLM's worker does, add up all ranks, and stay until the group ends.

    LIBRARY in ``env`` is the folder that this rank takes for the package's kda/.
    """
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ.update(env)
    if "LIBRARY" in env:
        from vllm_overlay.kda import native

        native.FOLDER = Path(env["LIBRARY"])
    import torch
    import torch.distributed as dist

    from vllm_overlay.activate import failure
    from vllm_overlay.activate.gate import guard
    from vllm_overlay.activate.planfile import read_plan
    from vllm_overlay.activate.state import State

    def form() -> None:
        method = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(
            backend="gloo", init_method=method, world_size=world, rank=rank, timeout=None
        )

    vllm = types.ModuleType("vllm.distributed.parallel_state")
    vllm.init_distributed_environment = form  # type: ignore[attr-defined]
    if overlay:
        state = State(plan, read_plan(plan))
        failure.on_failure.append(state.record_failure)
        state.first_import()
        guard(vllm, state)
    vllm.init_distributed_environment()
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"added up {int(total)}", file=sys.stderr, flush=True)
    while env.get("STAY"):
        time.sleep(0.1)
    dist.barrier()
    dist.destroy_process_group()


def serve(
    plan: str, rank: int, world: int, port: int, log: str, silence: float, overlay: bool
) -> None:
    """Be what the others see of a node: a main process, and one rank below it.

    Without ``overlay`` the rank alone has the plan.
    """
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.setsid()
    from vllm_overlay.activate import failure, family, watch
    from vllm_overlay.activate.planfile import read_plan
    from vllm_overlay.activate.state import State

    watch.SILENCE, watch.BEAT = silence, 0.1
    pid, start = process_key()
    node = {"rank": rank, "count": world, "head": "127.0.0.1", "port": port, "nnodes": True}
    record = {
        "host": os.uname().nodename,
        "port": 1000 + rank,
        "served_model": "m",
        "recipe": "test",
        "started": "now",
        "node": {**node, "address": f"10.0.0.{rank + 1}"},
        "environment": {},
        "pid": pid,
        "start": start,
    }
    write_atomic(f"{Path(plan).parent}/runs/{pid}-{start}.json", record)
    if overlay:
        state = State(plan, read_plan(plan))
        failure.on_failure.append(state.record_failure)
        state.first_import()
        family.lead(state)
    setproctitle("VLLM::EngineCore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            join(plan, rank, world, port, {"STAY": "1"}, log, True)
        finally:
            os._exit(1)
    try:
        os.waitpid(child, 0)  # as vLLM's headless node, which ends with 0 if its worker dies
    finally:
        with suppress(OSError):
            os.kill(child, signal.SIGTERM)
        atexit._run_exitfuncs()  # which a child of the fork server passes by


@dataclass
class Rank:
    """One rank's process and what it has said."""

    process: Any
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def ends(self) -> int:
        """Wait for the end and return the exit status."""
        self.process.join(60)
        assert self.process.exitcode is not None, self.said
        status: int = self.process.exitcode
        return status

    def says(self, text: str) -> None:
        wait_for(lambda: text in self.said, f"{text!r} in {self.log.name}")


@dataclass
class Ranks:
    """Starts ranks of one group."""

    folder: Path
    plan: Plan = PLAN
    world: int = 2
    port: int = field(default_factory=free_port)
    started: list[Rank] = field(default_factory=list)

    def start(
        self,
        rank: int,
        *,
        overlay: bool = True,
        environ: Mapping[str, str] | None = None,
        **plan: Any,
    ) -> Rank:
        """Start a rank; ``plan`` are keys in which its plan differs, ``env`` its variables."""
        written = write_plan(replace(self.plan, **plan), self.folder / "home")
        log = self.folder / f"rank{rank}-{len(self.started)}.log"
        arguments = (
            str(written),
            rank,
            self.world,
            self.port,
            dict(environ or {}),
            str(log),
            overlay,
        )
        process = FORKED.Process(target=join, args=arguments, daemon=True)
        process.start()
        self.started.append(Rank(process, log))
        return self.started[-1]

    def serve(self, rank: int, silence: float = 60, *, overlay: bool = True) -> Rank:
        """Start a whole node with one rank; ``silence`` are seconds before it counts as lost.

        Without ``overlay`` its main process has no plan.
        """
        written = write_plan(self.plan, self.folder / "home")
        log = self.folder / f"node{rank}-{len(self.started)}.log"
        arguments = (str(written), rank, self.world, self.port, str(log), silence, overlay)
        process = FORKED.Process(target=serve, args=arguments)
        process.start()
        self.started.append(Rank(process, log))
        return self.started[-1]


@contextmanager
def ranks(folder: Path, world: int = 2, **plan: Any) -> Iterator[Ranks]:
    """A group to be started; no process is left at the end."""
    made = Ranks(folder, replace(PLAN, **plan), world)
    try:
        yield made
    finally:
        for rank in made.started:
            with suppress(OSError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.kill()
            rank.process.join()
