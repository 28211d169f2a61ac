"""The plan as one process sees it: what each module needs, and what has been applied so far."""

from __future__ import annotations

import os
import sys
import time
from _thread import RLock

from vllm_overlay.activate.failure import refuse

TYPE_CHECKING = False  # importing typing costs more than the rest of the start
if TYPE_CHECKING:
    from typing import Any


class State:
    """One process's view of the plan. ``applied`` holds (fix, module) pairs."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.folder = os.path.dirname(os.path.abspath(path))  # plans/<digest>
        self.home = os.path.dirname(os.path.dirname(self.folder))
        self.vllm_imported = False
        self.applied: set[tuple[str, str]] = set()
        self.notes: dict[str, dict[str, str]] = {}  # of a fix: what it chose here
        self.environment: dict[str, str] = {}  # as it was before vLLM changed it
        self.group: dict[str, Any] | None = None  # of several nodes, once this rank has joined
        self.lock = RLock()
        self.told = False  # whether the head of several nodes knows why this process is refused
        self._data = data
        self._plan: dict[str, Any] | None = None

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, parsed when it is first asked for: by then this process imports vLLM."""
        if self._plan is None:
            import json

            plan: dict[str, Any] = json.loads(self._data)
            if plan.get("schema") != 1:
                found, remedy = plan.get("schema"), "use one release of vllm-overlay everywhere"
                refuse("the plan is of another schema", expected=1, found=found, remedy=remedy)
            self._plan = plan
        return self._plan

    def is_main(self) -> bool:
        """Whether `vllm-overlay serve` became this process: it left word of it beside the plan."""
        try:
            names = os.listdir(f"{self.folder}/runs")
        except OSError:
            return False
        if not any(name.startswith(f"{os.getpid()}-") for name in names):
            return False
        from vllm_overlay.activate.receipt import process_key

        pid, start = process_key()
        return f"{pid}-{start}.json" in names

    def mark(self, *pairs: tuple[str, str]) -> None:
        """Record applied (fix, module) pairs, and rewrite this process's receipt."""
        with self.lock:
            self.applied.update(pairs)
            self.write()

    def note(self, fix: str, key: str, value: str) -> None:
        """Record what a fix chose in this process, and rewrite the receipt if that is new.

        Raises ValueError for a fix that the plan does not apply, TypeError for what is no text.
        """
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"fix {fix!r} notes {key!r}: {value!r}; both must be text")
        with self.lock:
            applied = [item["name"] for item in self.plan["fixes"] if item["verdict"] == "apply"]
            if fix not in applied:
                raise ValueError(f"the plan applies no fix {fix!r}; it applies {applied}")
            noted = self.notes.setdefault(fix, {})
            if noted.get(key) != value:
                noted[key] = value
                self.write()

    def write(self) -> None:
        """Write the receipt of this process; a receipt that cannot be written ends it."""
        from vllm_overlay.activate.receipt import write_receipt

        with self.lock:
            if not self.vllm_imported:
                return
            self._look_for_strays()
            try:
                write_receipt(self.folder, self.plan, self.applied, self.notes, self.group)
            except OSError as error:
                refuse(
                    "the receipt of this process cannot be written",
                    expected=f"a writable folder {self.folder}/receipts with free space",
                    found=error,
                    remedy="make the state folder writable and free space in it",
                )

    def _look_for_strays(self) -> None:
        """End the process if a module of the plan was loaded past the plan's loader."""
        from vllm_overlay.activate.loader import Loader

        for name, entry in self.plan["modules"].items():
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if spec is None or getattr(spec, "_initializing", False):
                continue  # not imported, or on its way
            if not isinstance(spec.loader, Loader):
                refuse(
                    "a module of the plan was imported without it",
                    fix=entry["fixes"][0]["fix"],
                    module=name,
                    expected="the overlay's loader",
                    found=spec.loader,
                    remedy="find what puts itself before the overlay on sys.meta_path",
                )

    def first_import(self) -> None:
        """Note that this process imports vLLM: from now on it owes a receipt."""
        with self.lock:
            if not self.vllm_imported:
                self.vllm_imported = True
                self.environment = dict(os.environ)
                self.write()

    def join(self, group: dict[str, Any]) -> None:
        """Note the group of several nodes that this rank joins, or for whom it is ``waiting``."""
        with self.lock:
            self.group = group
            self.write()

    def after_fork(self) -> None:
        """A forked child imports nothing new: write its receipt from what it inherited."""
        self.lock = RLock()  # another thread may have held it at the fork
        try:
            self.write()
        except Exception as error:  # Python only prints what an at-fork function raises
            refuse("the receipt of a forked process cannot be written", found=repr(error))

    def record_failure(self, line: str, *, lost: bool = False) -> None:
        """Leave the failure beside the plan, for `status`, `health` and the main process.

        ``lost``: nothing is wrong with this process, but its group has ended.
        """
        from vllm_overlay.activate.receipt import process_key, write_atomic

        pid, start = process_key()
        plan = os.path.basename(self.folder)
        record = {"schema": 1, "host": os.uname().nodename, "pid": pid, "start": start}
        record |= {"plan": plan, "line": line, "told": self.told, "lost": lost, "at": time.time()}
        try:
            write_atomic(f"{self.folder}/failures/{pid}-{start}.json", record)
        except OSError:
            pass  # the line itself is on standard error
