"""Is this node really serving, with every fix in every process? Imports no vLLM and no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.answer import FRESH, PATIENCE, known_answer
from vllm_overlay.client import Client, UnreachableError
from vllm_overlay.processes import PROC, Proc, alive, vllm_processes
from vllm_overlay.receipts import Receipt, read, read_failures
from vllm_overlay.runs import Run

SERVER_TIMEOUT = 5.0  # seconds for vLLM's own /health
# A child between fork and exec, or between fork and its receipt, looks like a process without
# one. A process that stays so for this many seconds is one.
SETTLE = 2.0
POLL = 0.05


@dataclass(frozen=True)
class Check:
    """One of the things that must hold, and why it does not."""

    name: str
    ok: bool
    reasons: tuple[str, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class Health:
    """True only if every check is."""

    plan: str | None
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(reason for check in self.checks for reason in check.reasons)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of ``health --json``."""
        return {
            "ok": self.ok,
            "reasons": list(self.reasons),
            "plan": self.plan,
            "checks": [asdict(check) for check in self.checks],
        }


def check(
    run: Run | None, fresh: float = FRESH, patience: float = PATIENCE, proc: Path = PROC
) -> Health:
    """Check a server of this node; ``run`` is None if there is none.

    ``fresh`` and ``patience`` are seconds: how old a known answer may be, and how long to wait
    for one. Takes at most ``patience`` + SERVER_TIMEOUT + SETTLE seconds.
    """
    if run is None:
        reason = "no server that vllm-overlay started is running on this node"
        return Health(None, (Check("server", False, (reason,)),))
    processes = check_processes(run, proc)
    if run.headless:
        return Health(run.digest, (processes,))
    server = check_server(run)
    answer = check_answer(run, fresh, patience) if server.ok else _not_asked()
    nodes = (check_nodes(run),) if run.node else ()
    return Health(run.digest, (server, processes, *nodes, answer))


def check_server(run: Run) -> Check:
    """Ask vLLM's own /health."""
    try:
        reply = Client(run.url, run.served_model, timeout=SERVER_TIMEOUT).get("/health")
    except UnreachableError as error:
        return Check("server", False, (f"vLLM's health: {error}",))
    if reply.status != 200:
        said = f"{reply.status} {reply.text[:200]}".strip()
        return Check("server", False, (f"vLLM's {run.url}/health answered {said}",))
    return Check("server", True, detail=f"{run.url}/health answered 200")


def check_answer(run: Run, fresh: float, patience: float) -> Check:
    """Have the model give its known answer, or believe a fresh one."""
    try:
        answer = known_answer(run, fresh, patience)
    except OSError as error:
        return Check("answer", False, (f"the state folder cannot be written: {error}",))
    return Check("answer", answer.ok, () if answer.ok else (answer.detail,), answer.detail)


def check_nodes(run: Run) -> Check:
    """Hold what the other nodes say of their processes against the plan."""
    from vllm_overlay.cluster import reasons

    found = tuple(reasons(run))
    return Check("nodes", not found, found, f"{run.node['count']} nodes" if run.node else "")


def check_processes(run: Run, proc: Path = PROC, settle: float = SETTLE) -> Check:
    """Hold every live vLLM process of this node against its receipt."""
    deadline = time.monotonic() + settle
    while True:
        processes = vllm_processes(proc)
        receipts = receipts_of(processes, run.folder.parent)
        reasons = _process_reasons(run, processes, receipts, proc)
        if not reasons or time.monotonic() > deadline:
            break
        time.sleep(POLL)
    mine = [p for p in processes if _belongs(p, receipts, run.digest)]
    detail = ", ".join(f"{p.pid} {p.role} {p.state}" for p in mine)
    return Check("processes", not reasons, tuple(reasons), detail)


def receipts_of(processes: Iterable[Proc], plans: Path) -> dict[tuple[int, int], Receipt]:
    """Return the receipts of these processes from every plan, also of another state folder.

    Call it with processes seen before: who has loaded vLLM has written its receipt before.
    """
    wanted = {(p.pid, p.start): p for p in processes}
    folders = {*plans.glob("*"), *(p.plan.parent for p in wanted.values() if p.plan)}
    found = {}
    for folder in folders:
        for receipt in read(folder):
            here = receipt.host == os.uname().nodename or receipt.problem
            if here and (receipt.pid, receipt.start) in wanted:
                found[receipt.pid, receipt.start] = receipt
    return found


def _process_reasons(
    run: Run, processes: list[Proc], receipts: dict[tuple[int, int], Receipt], proc: Path
) -> list[str]:
    reasons = []
    for process in processes:
        receipt = receipts.get((process.pid, process.start))
        if not _belongs(process, receipts, run.digest):
            continue
        reason = _receipt_reason(run, process, receipt)
        if reason and alive(process.pid, process.start, proc):
            reasons.append(f"process {process.pid} ({process.title[:60]}): {reason}")
    # Not those of an engine that outlived an earlier server of this plan.
    ours = [r for r in receipts.values() if r.plan == run.digest and r.start >= run.start]
    roles = {receipt.role for receipt in ours}
    reasons += [f"no live {role} process" for role in _required(run) if role not in roles]
    for failure in read_failures(run.folder):
        if failure.start >= run.start or not failure.start:
            reasons.append(f"process {failure.pid} was ended by its overlay: {failure.line}")
    return reasons


def _belongs(process: Proc, receipts: dict[tuple[int, int], Receipt], digest: str) -> bool:
    """Return whether the process counts for this plan: all do but those of another plan."""
    receipt = receipts.get((process.pid, process.start))
    if receipt is not None:
        return receipt.plan == digest
    return process.plan is None or process.plan.parent.name == digest


def _receipt_reason(run: Run, process: Proc, receipt: Receipt | None) -> str | None:
    if receipt is None:
        if process.state == "starting":
            return None
        why = "was started without the plan" if process.state == "without plan" else process.why
        return f"a vLLM process without a receipt ({why})"
    if process.state == "without plan":  # exec keeps pid and start time, and so the receipt
        return "was started without the plan; the receipt under its name is of what ran before it"
    if receipt.problem or receipt.waiting:
        return receipt.problem or receipt.waiting
    wrong = [f"{fix} is {receipt.state(fix)}" for fix in run.fixes if not _fine(receipt, fix)]
    return "; ".join(wrong) or None


def _fine(receipt: Receipt, fix: str) -> bool:
    return receipt.state(fix) in ("applied", "waiting")


def _required(run: Run) -> list[str]:
    """Return the roles that must live: those of every server, and those that this one had."""
    mine = (r for r in read(run.folder) if r.host == os.uname().nodename and not r.problem)
    seen = {r.role for r in mine if r.start >= run.start}  # no other host's clock counts
    roles = ["api-server", "engine-core"]
    if run.headless:  # of data parallel ranks it has engines, of others only workers
        roles = ["engine-core" if "engine-core" in seen else "worker"]
    return roles + sorted(seen & {"worker", "coordinator"} - {*roles})


def _not_asked() -> Check:
    return Check("answer", False, detail="not asked: vLLM's own health is not good")
