"""What the state folder holds, which plans use it, and what may go.

A plan is kept while a server has it, or while it was used lately. Caches and patched sources are
kept with the plans that name them: caches/<cache key>, store/<digest>.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_overlay.errors import ConfigError, raise_all
from vllm_overlay.inuse import LOCK, alone, in_use, live_pids
from vllm_overlay.processes import PROC
from vllm_overlay.receipts import NAME
from vllm_overlay.recipe_format import CACHE_VARIABLES

if TYPE_CHECKING:
    from rich.console import RenderableType

DAY = 86_400  # seconds
PLAN_FILE = "plan.json"
RECORDS = ("receipts", "failures", "runs")  # of a plan's processes


@dataclass(frozen=True)
class Entry:
    """One thing in the state folder. ``kind``: plan, cache, store, release or info.

    ``plans`` are the digests of the plans that use it and ``recipes`` their recipes, with a
    variant as ``name (variant)``; ``elsewhere`` are cache folders that a plan has outside.
    """

    kind: str
    name: str
    path: str
    bytes: int  # on the disk
    last_used: float  # seconds since the epoch
    plans: tuple[str, ...]
    recipes: tuple[str, ...]
    in_use: bool  # by a server that lives
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True)
class Removal:
    """Something that was removed, or would be: ``why`` says what made it useless."""

    kind: str
    name: str
    path: str
    bytes: int
    why: str


@dataclass(frozen=True)
class _Plan:
    digest: str
    folder: Path
    recipe: str
    cache_key: str | None
    store: frozenset[str]
    elsewhere: tuple[str, ...]
    last_used: float
    in_use: bool


def survey(home: Path, proc: Path = PROC) -> list[Entry]:
    """Return what the state folder ``home`` holds: caches first, the largest first of each kind.

    Raises ConfigError if the plan of a live server cannot be read.
    """
    plans = _plans(home, proc)
    found = [
        *_users(home, "cache", "caches", plans),
        *(_entry("plan", plan.folder, [plan]) for plan in plans),
        *_users(home, "store", "store", plans),
        *(_entry("release", path, []) for path in _children(home / "releases")),
        *(_entry("info", path, []) for path in (home / "info",) if path.is_dir()),
    ]
    order = ["cache", "plan", "store", "release", "info"]
    return sorted(found, key=lambda item: (order.index(item.kind), -item.bytes, item.name))


def prune(
    home: Path, days: int, *, dry_run: bool = False, proc: Path = PROC
) -> tuple[list[Removal], list[str]]:
    """Remove the plans without a server that were not used for ``days``, and what only they use.

    Returns what was removed, or would be, and the cache folders outside ``home`` that removed
    plans had, which are left alone. Nothing of a live server is touched, and none can start
    meanwhile. Raises ConfigError(s) if a live server's plan cannot be read (nothing is removed
    then), or for what cannot be removed.
    """
    if dry_run or not home.is_dir():
        return _useless(home, days, proc)
    with alone(home):
        removals, elsewhere = _useless(home, days, proc)
        errors = [error for item in removals if (error := _remove(Path(item.path)))]
    raise_all(errors)
    return removals, elsewhere


def as_json(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return entries as JSON-ready data, with the times in ISO 8601."""
    return [{**asdict(item), "last_used": _iso(item.last_used)} for item in entries]


def _useless(home: Path, days: int, proc: Path) -> tuple[list[Removal], list[str]]:
    plans = _plans(home, proc)
    since = time.time() - days * DAY if days else float("inf")
    kept = [plan for plan in plans if plan.in_use or plan.last_used >= since]
    gone = [plan for plan in plans if plan not in kept]
    why = f"no server has it, and it was not used for {days} days" if days else "no server has it"
    found = [_removal("plan", plan.folder, why) for plan in gone]
    for plan in kept:
        found += [_removal("receipt", path, "its process ended") for path in _stale(plan, proc)]
    keys = {plan.cache_key for plan in kept}
    found += [
        _removal("cache", path, "no kept plan uses it")
        for path in _children(home / "caches")
        if path.name not in keys
    ]
    stored = {name for plan in kept for name in plan.store}
    found += [
        _removal("store", path, "no kept plan uses it")
        for path in _children(home / "store")
        if path.name not in stored
    ]
    return found, sorted({path for plan in gone for path in plan.elsewhere})


def _plans(home: Path, proc: Path) -> list[_Plan]:
    return [_plan(folder, home, in_use(folder, proc)) for folder in _children(home / "plans")]


def _plan(folder: Path, home: Path, used: bool) -> _Plan:
    body: Mapping[str, Any] = {}
    try:
        body = json.loads((folder / PLAN_FILE).read_bytes())
        recipe, variant = str(body["recipe"]["name"]), body["recipe"]["variant"]
        key = str(body["cache_key"])
        sources = [entry["source"]["file"] for entry in body["modules"].values() if entry["source"]]
        env = [str(body["env"][name]) for name in CACHE_VARIABLES if name in body["env"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        if used:
            raise ConfigError(
                "the plan of a running server cannot be read",
                file=folder / PLAN_FILE,
                found=f"{type(error).__name__}: {error}",
                remedy="restart the server",
            ) from None
        return _Plan(folder.name, folder, "unreadable", None, frozenset(), (), _time(folder), False)
    parts = [Path(source).parts for source in sources]
    outside = [path for path in env if not Path(path).is_relative_to(home) and Path(path).is_dir()]
    return _Plan(
        digest=folder.name,
        folder=folder,
        recipe=f"{recipe} ({variant})" if variant else recipe,
        cache_key=key,
        store=frozenset(names[1] for names in parts if names[0] == "store"),
        elsewhere=tuple(outside),
        last_used=time.time() if used else _time(folder),
        in_use=used,
    )


def _time(plan: Path) -> float:
    """Return when a plan was last started: `serve` sets the time of its lock."""
    for path in (plan / LOCK, plan / PLAN_FILE, plan):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


def _stale(plan: _Plan, proc: Path) -> Iterator[Path]:
    """Yield the records of a plan's processes that ended.

    While the plan is in use, one whose process is not of this node may live on another.
    """
    live = live_pids(plan.folder, proc)
    here = os.uname().nodename
    for path in (item for kind in RECORDS for item in _children(plan.folder / kind)):
        match = NAME.fullmatch(path.name)
        if not plan.in_use or (match and int(match[1]) not in live and _host(path) == here):
            yield path


def _host(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_bytes())["host"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _users(home: Path, kind: str, folder: str, plans: Sequence[_Plan]) -> Iterator[Entry]:
    for path in _children(home / folder):
        names = [plan.store if kind == "store" else {plan.cache_key} for plan in plans]
        users = [plan for plan, own in zip(plans, names, strict=True) if path.name in own]
        yield _entry(kind, path, users)


def _entry(kind: str, path: Path, users: Sequence[_Plan]) -> Entry:
    size, newest = _measure(path)
    times = [plan.last_used for plan in users]
    return Entry(
        kind=kind,
        name=path.name,
        path=str(path),
        bytes=size,
        last_used=max(times) if kind == "plan" else max([newest, *times]),
        plans=tuple(plan.digest for plan in users),
        recipes=tuple(sorted({plan.recipe for plan in users})),
        in_use=any(plan.in_use for plan in users),
        elsewhere=users[0].elsewhere if kind == "plan" else (),
    )


def _removal(kind: str, path: Path, why: str) -> Removal:
    return Removal(kind, path.name, str(path), _measure(path)[0], why)


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(
            "the state folder cannot be read", file=folder, found=error.strerror
        ) from None


def _measure(path: Path) -> tuple[int, float]:
    """Return the bytes that a tree takes on the disk, links not followed, and its newest time."""
    files: dict[tuple[int, int], int] = {}
    newest = 0.0
    above = [path]
    while above:
        item = above.pop()
        try:
            info = item.lstat()
            files[info.st_dev, info.st_ino] = info.st_blocks * 512
            newest = max(newest, info.st_mtime)
            above += item.iterdir() if item.is_dir() and not item.is_symlink() else []
        except OSError:
            continue  # it went just now, or is another user's
    return sum(files.values()), newest


def _remove(path: Path) -> ConfigError | None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return ConfigError(
            "this cannot be removed", file=error.filename or path, found=error.strerror
        )
    return None


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def human(size: float) -> str:
    """Return a number of bytes for people: 4.0 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def survey_table(entries: Sequence[Entry]) -> RenderableType:
    """Return the entries as a table for a terminal."""
    from rich.table import Column, Table
    from rich.text import Text

    table = Table("kind", "name", Column("size", justify="right"), "last used", "recipes", "in use")
    for item in entries:
        plans = f" ({len(item.plans)} plans)" if len(item.plans) > 1 else ""
        recipes = ", ".join(item.recipes) + plans if item.recipes else "-"
        used = Text("yes", style="green") if item.in_use else Text("no", style="dim")
        known = item.kind in ("cache", "plan", "store")
        row = (item.kind, item.name[:16], human(item.bytes), _iso(item.last_used)[:10], recipes)
        table.add_row(*map(Text, row), used if known else Text(""))
    table.caption = f"{human(sum(item.bytes for item in entries))} in all"
    return table


def prune_json(
    removals: Sequence[Removal], elsewhere: Sequence[str], dry_run: bool
) -> dict[str, Any]:
    """Return what `cache prune --json` prints."""
    return {
        "dry_run": dry_run,
        "removed": [asdict(item) for item in removals],
        "left": list(elsewhere),
        "freed_bytes": sum(item.bytes for item in removals),
    }


def prune_lines(removals: Sequence[Removal], elsewhere: Sequence[str], dry_run: bool) -> list[str]:
    """Return what `cache prune` says, one line a thing."""
    did = "would remove" if dry_run else "removed"
    lines = [f"{did} {r.kind} {r.name[:24]} ({human(r.bytes)}): {r.why}" for r in removals]
    lines += [f"left {path}: it lies outside of the state folder" for path in elsewhere]
    freed = human(sum(item.bytes for item in removals))
    return [*lines, f"{'would free' if dry_run else 'freed'} {freed}"]
