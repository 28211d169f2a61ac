"""A recipe under load with a fix on and with it off, in turn."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_overlay.background import (
    EndedError,
    background,
    interruptible,
    last_lines,
    log_file,
    wait_up,
)
from vllm_overlay.bench.load import Load, kv_capacity, run_load
from vllm_overlay.bench.sides import Side
from vllm_overlay.doctor.network import port_of
from vllm_overlay.errors import EXIT_CONFIG, ConfigError, FailedError, UsageError
from vllm_overlay.health import check, check_processes
from vllm_overlay.launch import child_environment
from vllm_overlay.resolve import Request
from vllm_overlay.runs import Run, live_runs, server_url
from vllm_overlay.status import status_rows

COMMAND = Path(sys.executable).with_name("vllm-overlay")


@dataclass(frozen=True)
class Loads:
    """What each server is asked: a load for each number of ``streams``; lengths in tokens."""

    streams: tuple[int, ...]
    prompts_per_stream: int
    input_len: int
    output_len: int
    rounds: int


@dataclass
class Measured:
    """The result. ``servers``: plan, KV capacity and processes of each server; ``rows``: loads."""

    sides: tuple[Side, Side]
    servers: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


def parse_streams(text: str) -> tuple[int, ...]:
    """Return the numbers of ``8,32,64``. Raises UsageError for any other form."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UsageError(
            "--streams is no list of numbers", found=repr(text), expected="such as 8,32,64"
        )
    return tuple(int(word) for word in words)


def measure(request: Request, sides: tuple[Side, Side], loads: Loads) -> Measured:
    """Serve the first side, put every load on it, stop it, then the other one; so in each round.

    Raises ConfigError for what forbids to start, FailedError for what goes wrong later,
    KeyboardInterrupt on a signal; no server is left in any case.
    """
    for run in live_runs(request.folders.home):
        raise ConfigError(
            "another server runs on this node, and would share the machine",
            found=f"{run.recipe} at {run.url}, process {run.pid}", remedy="stop it",
        )  # fmt: skip
    measured = Measured(sides)
    console = Console(stderr=True, highlight=False)
    with interruptible():
        for number in range(1, loads.rounds + 1):
            for side in sides:
                title = f"round {number} of {loads.rounds}, {side.fix} {side.name}"
                with served(side, request, title, console) as run:
                    server, rows = _under_load(side, run, _loads(loads, number), title, console)
                here = {"side": side.name, "round": number}
                measured.servers.append({**here, **server})
                measured.rows += [{**here, **row} for row in rows]
    return measured


def _under_load(
    side: Side, run: Run, loads: Sequence[Load], title: str, console: Console
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Put the loads on a server; return what it shows of itself, and what came of each load."""
    environ = child_environment(side.plan, run.folder / "plan.json", side.environ)
    rows = []
    for load in loads:
        with console.status(f"{title}: {load.streams} streams"):
            rows.append(run_load(run.url, side.plan, environ, load))
    server = {"plan": run.digest, "processes": proof(side, run)}
    return {**server, "kv_capacity_tokens": kv_capacity(run.url)}, rows


def _loads(loads: Loads, number: int) -> list[Load]:
    """Return the loads of a round: other prompts each, but the same ones on both sides."""
    return [
        Load(
            streams=streams,
            prompts=streams * loads.prompts_per_stream,
            input_len=loads.input_len,
            output_len=loads.output_len,
            seed=number * len(loads.streams) + index,
        )
        for index, streams in enumerate(loads.streams)
    ]


@contextmanager
def served(side: Side, request: Request, title: str, console: Console) -> Iterator[Run]:
    """Serve a side until the block ends; its model answers right when the block begins."""
    variant = ["--variant", request.variant] if request.variant else []
    command = [str(COMMAND), "serve", request.recipe, *variant, "--", *request.extra]
    home = request.folders.home
    log = log_file(home, f"bench-{side.name}")
    serve = side.plan.serve
    url = server_url(str(serve.get("host") or ""), port_of(side.plan), serve)
    with background(command, log, side.environ) as server:
        began = time.monotonic()
        with console.status(f"{title}: vLLM starts") as shown:
            try:
                wait_up(server, url, lambda: shown.update(_starting(title, began, log)))
            except EndedError as ended:
                raise _refused(ended, log) from None
            run = next((run for run in live_runs(home) if run.pid == server.pid), None)
            if run is None or run.digest != side.plan.digest:
                found = run.digest[:16] if run else "no record of it"
                raise FailedError(
                    "the server runs another plan than was resolved", found=found,
                    expected=side.plan.digest[:16], remedy="leave recipe and fixes alone meanwhile",
                )  # fmt: skip
            _must_be_whole(check(run).reasons, log)
        yield run


def _starting(title: str, began: float, log: Path) -> str:
    line = escape(last_lines(log, 1)[:80])
    return f"{title}: vLLM starts, {time.monotonic() - began:.0f} s  [dim]{line}[/dim]"


def _refused(ended: EndedError, log: Path) -> ConfigError:
    kind = ConfigError if ended.status == EXIT_CONFIG else FailedError
    return kind(f"{ended}", found=last_lines(log, 1), remedy=f"all of it: {log}")


def _must_be_whole(reasons: Sequence[str], log: Path) -> None:
    if reasons:
        raise FailedError(
            "the server is not healthy", found="; ".join(reasons), remedy=f"its log: {log}"
        )


def proof(side: Side, run: Run) -> list[dict[str, Any]]:
    """Return each process of the server with what its receipt says of the fix: role, rank, state.

    ``applied``, or ``waiting`` where the process never imported what the fix changes; ``absent``
    with the fix off. Raises FailedError unless that is so in every process, and in one at least.
    """
    reasons = list(check_processes(run).reasons)
    known = status_rows(run.folder.parent.parent)["processes"]
    rows = [row for row in known if row["plan"] == run.digest and row["state"] == "running"]
    states = [row["fixes"].get(side.fix, "absent") for row in rows]
    wanted = {"on": {"applied", "waiting"}, "off": {"absent"}}[side.name]
    reasons += [
        f"{side.fix} is {state} in process {row['pid']} ({row['role']})"
        for row, state in zip(rows, states, strict=True)
        if state not in wanted
    ]
    if side.name == "on" and "applied" not in states:
        reasons.append(f"no process has applied {side.fix}")
    if reasons or not rows:
        raise FailedError(
            f"the receipts do not show the fix {side.name} in every process",
            found="; ".join(reasons) or "no process",
        )
    return [
        {"role": row["role"], "rank": row["rank"], side.fix: state}
        for row, state in zip(rows, states, strict=True)
    ]


def command_line() -> str:
    """Return the command that this process was called with."""
    return shlex.join(["vllm-overlay", *sys.argv[1:]])
