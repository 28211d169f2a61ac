"""The plan as one process sees it: what each module needs, and what has been applied so far."""

from __future__ import annotations

import atexit
import json
import os
import threading
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from vllm_overlay.activate import failure
from vllm_overlay.activate.failure import refuse
from vllm_overlay.activate.receipt import process_key, write_atomic, write_receipt


def sha256(data: bytes) -> str:
    """Return the hex SHA-256. The built-in module: hashlib would load OpenSSL at every start."""
    try:
        module = import_module("_sha2")  # Python 3.12 and later
    except ImportError:
        try:
            module = import_module("_sha256")
        except ImportError:
            module = import_module("hashlib")
    digest: str = module.sha256(data).hexdigest()
    return digest


def plan_digest(plan: dict[str, Any]) -> str:
    """Return the digest of a plan: over its canonical JSON without the key ``digest``."""
    body = {key: value for key, value in plan.items() if key != "digest"}
    return sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


@dataclass
class State:
    """One process's view of the plan. ``applied`` holds (fix, module) pairs."""

    plan: dict[str, Any]
    folder: str  # plans/<digest>
    home: str
    vllm_imported: bool = False
    applied: set[tuple[str, str]] = field(default_factory=set)
    lock: Any = field(default_factory=threading.RLock)

    def mark(self, *pairs: tuple[str, str]) -> None:
        """Record applied (fix, module) pairs, and rewrite this process's receipt."""
        with self.lock:
            self.applied.update(pairs)
            self.write()

    def write(self) -> None:
        """Write the receipt of this process; a receipt that cannot be written ends it."""
        with self.lock:
            if not self.vllm_imported:
                return
            try:
                write_receipt(self.folder, self.plan, self.applied)
            except OSError as error:
                refuse(
                    "the receipt of this process cannot be written",
                    expected=f"a writable folder {self.folder}/receipts with free space",
                    found=error,
                    remedy="make the state folder writable and free space in it",
                )

    def first_import(self) -> None:
        """Note that this process imports vLLM: from now on it owes a receipt."""
        with self.lock:
            if not self.vllm_imported:
                self.vllm_imported = True
                self.write()

    def after_fork(self) -> None:
        """A forked child imports nothing new: write its receipt from what it inherited."""
        self.lock = threading.RLock()  # another thread may have held it at the fork
        try:
            self.write()
        except Exception as error:  # Python only prints what an at-fork function raises
            refuse("the receipt of a forked process cannot be written", found=repr(error))

    def record_failure(self, line: str) -> None:
        """Leave the failure beside the plan, for `status`, `health` and the main process."""
        pid, start = process_key()
        record = {"schema": 1, "pid": pid, "start": start, "plan": self.plan["digest"]}
        record["line"] = line
        try:
            write_atomic(f"{self.folder}/failures/{pid}-{start}.json", record)
        except OSError:
            pass  # the line itself still goes to standard error

    def exit_status(self) -> None:
        """Leave the main process with 78 if one of its processes was refused.

        vLLM turns the end of a worker or of EngineCore into status 1, and a supervisor must be
        able to tell a refused configuration from a crash.
        """
        try:
            refused = bool(os.listdir(f"{self.folder}/failures"))
        except OSError:
            return
        if refused:
            os._exit(failure.EXIT_CONFIG)


def load(path: str) -> State:
    """Read the plan at ``path``, check its digest, and return this process's state.

    A plan that is missing, torn, altered, or of another schema ends the process.
    """
    remedy = "start the server with `vllm-overlay serve`, which writes the plan"
    try:
        with open(path, "rb") as file:
            plan = json.loads(file.read())
        if not isinstance(plan, dict) or plan.get("schema") != 1:
            raise ValueError("not a plan of schema 1")
    except (OSError, ValueError) as error:
        refuse(f"the plan {path} cannot be read", found=error, remedy=remedy)
    digest = plan_digest(plan)
    folder = os.path.dirname(os.path.abspath(path))
    named = os.path.basename(folder)
    if not digest == plan.get("digest") == named:
        refuse(
            f"the plan {path} was altered",
            expected=f"digest {named}",
            found=f"{digest} (the file says {plan.get('digest')})",
            remedy=remedy,
        )
    home = os.path.dirname(os.path.dirname(folder))
    state = State(plan, folder, home)
    failure.recorder = state.record_failure
    os.register_at_fork(after_in_child=state.after_fork)
    pid, start = process_key()
    if os.path.exists(f"{folder}/runs/{pid}-{start}.json"):
        atexit.register(state.exit_status)
    return state
