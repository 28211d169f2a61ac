"""Reads what the processes of a plan wrote: receipts and failures.

Several hosts may share the folder. A record without ``host`` counts as this host's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAME = re.compile(r"(\d+)-(\d+)\.json")


@dataclass(frozen=True)
class Receipt:
    """What one process wrote about itself.

    ``problem`` says why a file is no receipt; pid and start then come from its name (0 if that
    is unreadable too), and the rest is empty.
    """

    pid: int
    start: int  # clock ticks since boot
    plan: str
    host: str = ""
    ppid: int = 0
    title: str = ""
    role: str = "other"
    rank: str | None = None
    environment: str = ""
    updated: str = ""
    fixes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # fix -> module -> state
    notes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # fix -> key -> value
    waiting: str | None = None  # of a rank of several nodes: for whom
    roster: Sequence[Mapping[str, Any]] = ()  # of rank 0: who has joined
    problem: str | None = None

    def state(self, fix: str) -> str:
        """Return applied, waiting (no module of it imported here yet), partial, or absent."""
        if fix not in self.fixes:
            return "absent"
        states = set(self.fixes[fix].values())
        if states <= {"applied", "waiting"}:
            return "applied" if "applied" in states else "waiting"
        return ", ".join(sorted(states - {"applied", "waiting"}))


@dataclass(frozen=True)
class Failure:
    """A process that activation ended: ``line`` is what it said."""

    pid: int
    start: int
    line: str


def read(plan_dir: Path) -> list[Receipt]:
    """Return the receipts under ``plan_dir``, those of dead processes too, by pid.

    A file that is being written (``.tmp``) is ignored; one that is no receipt has a ``problem``.
    """
    found = [_receipt(path, plan_dir.name) for path in _files(plan_dir / "receipts")]
    return sorted(found, key=lambda receipt: (receipt.pid, receipt.start))


def read_failures(plan_dir: Path) -> list[Failure]:
    """Return this host's failures under ``plan_dir``, by start time."""
    found = []
    for path in _files(plan_dir / "failures"):
        pid, start = _named(path)
        try:
            record = json.loads(path.read_bytes())
            if not _here(record):
                continue
            line = str(record["line"])
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            line = f"{path} cannot be read: {type(error).__name__}: {error}"
        found.append(Failure(pid, start, line))
    return sorted(found, key=lambda failure: (failure.start, failure.pid))


def of_this_host(path: Path) -> bool:
    """Return whether a record is this host's, as far as it can be read."""
    try:
        return _here(json.loads(path.read_bytes()))
    except (OSError, ValueError, AttributeError):
        return True


def _here(record: dict[str, Any]) -> bool:
    host = os.uname().nodename
    return bool(record.get("host", host) == host)


def _files(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(folder.iterdir())
    except FileNotFoundError:
        return
    yield from (path for path in names if path.suffix == ".json")


def _named(path: Path) -> tuple[int, int]:
    match = NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _receipt(path: Path, plan: str) -> Receipt:
    pid, start = _named(path)
    try:
        record = json.loads(path.read_bytes())
        receipt = _parse(record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else error  # which repeats the path
        said = f"{type(error).__name__}: {why}"
        return Receipt(pid, start, plan, problem=f"receipt {path} cannot be read: {said}")
    if (receipt.pid, receipt.start) != (pid, start):
        said = f"it names process {receipt.pid}-{receipt.start}"
        return Receipt(pid, start, plan, problem=f"receipt {path} is not its own: {said}")
    return receipt


def _parse(record: dict[str, Any]) -> Receipt:
    if record["schema"] != 1:
        raise ValueError(f"schema {record['schema']!r} is not 1")
    rank = record.get("rank")
    return Receipt(
        pid=int(record["pid"]),
        start=int(record["start"]),
        plan=str(record["plan"]),
        host=str(record["host"]),
        ppid=int(record["ppid"]),
        title=str(record["title"]),
        role=str(record["role"]),
        rank=None if rank is None else str(rank),
        environment=str(record["environment"]),
        updated=str(record["updated"]),
        fixes={str(fix["name"]): dict(fix["modules"]) for fix in record["fixes"]},
        notes={str(f["name"]): dict(f["notes"]) for f in record["fixes"] if f.get("notes")},
        waiting=(record.get("group") or {}).get("waiting"),
        roster=(record.get("group") or {}).get("roster", ()),
    )
