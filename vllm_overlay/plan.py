"""The plan: what a recipe resolves to on one vLLM. JSON, content-addressed, written once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_overlay.activate.planfile import with_digest
from vllm_overlay.errors import ConfigError
from vllm_overlay.patched import Modules


@dataclass(frozen=True)
class PlannedFix:
    """One fix of the plan. ``flag`` is the switch's name, ``value`` its effective value."""

    name: str
    verdict: str
    flag: str | None
    value: str | None
    value_from: str
    reasons: tuple[str, ...]
    targets: tuple[Mapping[str, Any], ...]  # {kind, module, symbols}
    digest: str


@dataclass(frozen=True)
class Plan:
    """Everything that a process must know; ``modules`` is what activation acts upon.

    ``notes`` are the needs of fixes that nothing but the start can check.

    ``modules[name]`` holds ``original`` (sha256 of vLLM's file, None for an added module),
    ``path`` (relative to the folder that holds vllm/), ``package``, ``source`` ({file, sha256}
    of the patched text, file relative to the state folder; absolute for an added module; None
    where only hooks apply) and ``fixes`` ({fix, kind, file, sha256, function} in order).
    ``nodes`` is {count, build} where several nodes serve together, else empty.
    """

    cache_key: str
    recipe: Mapping[str, Any]
    folders: Mapping[str, str]
    vllm: Mapping[str, str]
    model: str
    served_model: str
    serve: Mapping[str, Any]
    env: Mapping[str, str]
    fixes: tuple[PlannedFix, ...]
    overrides: tuple[Mapping[str, Any], ...]
    requires: Mapping[str, Any]
    smoke: Mapping[str, Any]
    modules: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...] = ()
    nodes: Mapping[str, Any] = field(default_factory=dict)
    schema: int = field(default=1)

    def file(self) -> bytes:
        """Return the plan's file: JSON that begins with its own digest."""
        return self._composed()[1]

    def body(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data, its digest included."""
        body: dict[str, Any] = json.loads(self.file())
        return body

    @property
    def digest(self) -> str:
        """The hex SHA-256 of the plan's JSON."""
        return self._composed()[0]

    def _composed(self) -> tuple[str, bytes]:
        text = json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"
        return with_digest(text.encode())

    def folder(self, home: Path) -> Path:
        """Return the plan's folder: plan.json, receipts/, failures/, runs/."""
        return home / "plans" / self.digest


def write_plan(plan: Plan, home: Path) -> Path:
    """Write the plan into the state folder and return its path; a present one is kept.

    Raises ConfigError where the folder is read-only or full; nothing is left half-written.
    """
    path = plan.folder(home) / "plan.json"
    data = plan.file()
    if not path.is_file() or path.read_bytes() != data:
        write_file(path, data)
    return path


def fill_store(modules: Modules, home: Path) -> None:
    """Write the patched sources, and link vLLM's own files beside those that look for them.

    Raises ConfigError where the folder cannot be written.
    """
    for name, text in modules.sources.items():
        path = home / name
        if not path.is_file() or path.read_bytes() != text:
            write_file(path, text)
    for name, target in modules.links.items():
        path = home / name
        if not path.is_symlink():
            with contextlib.suppress(FileExistsError):  # made by another start just now
                path.symlink_to(target)


def write_file(path: Path, data: bytes) -> None:
    """Write a file of the state folder so that it is there whole, or not at all."""
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise ConfigError(
            "the state folder cannot be written",
            file=path,
            found=error.strerror or str(error),
            expected="a writable folder with free space",
            remedy="mount a writable volume there, or name another folder with VLLM_OVERLAY_HOME",
        ) from None
