"""Every live vLLM process of this node, found by what it does, not by what it says it is.

Linux only: all of it comes from ``/proc``. Another PID namespace is another node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vllm_overlay.activate import PLAN_VARIABLE
from vllm_overlay.activate.receipt import role_of

PROC = Path("/proc")
PACKAGE = Path(__file__).parent
KERNEL_THREAD = 0x00200000  # PF_KTHREAD of the kernel's sched.h
SCRIPT_BYTES = 64 * 1024  # an import of vLLM stands near the top of a script

TITLE = re.compile(
    r"VLLM::\w|\w+::(APIServer|EngineCore|Worker|DPCoordinator|DPSupervisor)|ray::RayWorker"
)
LIBRARY = re.compile(rb"(?m)^[^/\n]*((/[^\n]*/vllm)/[^\n]*\.so)")
IMPORT = re.compile(r"(?m)(?:^|;)\s*(?:import|from)\s+vllm\b|['\"]vllm['\".]")
# Neither the resource tracker nor torch's compile workers, which import no vLLM.
CHILD = re.compile(r"multiprocessing\.(spawn|forkserver) import|--multiprocessing-fork")
PYTHON = re.compile(r"(python|pypy)[\d.]*t?$")
VALUE_OPTIONS = "WX"  # Python's options that take the next word; -c and -m end the options


@dataclass(frozen=True)
class Proc:
    """A live vLLM process. ``why`` is the evidence; ``plan`` the plan that it was started with.

    ``state`` is ``running`` (vLLM is loaded: a receipt is due), ``starting`` (not loaded yet), or
    ``without plan`` (started so that the overlay cannot be active in it).
    """

    pid: int
    start: int  # clock ticks since boot
    title: str
    role: str
    ppid: int
    why: str
    state: str
    plan: Path | None


@dataclass(frozen=True)
class _Raw:
    pid: int
    start: int
    ppid: int
    argv: tuple[str, ...]
    environ: Mapping[str, str] | None  # None: not readable, or overwritten by a process title
    library: str | None  # a shared object of vLLM that it maps
    torch: bool  # vLLM's first import loads torch

    @property
    def title(self) -> str:
        return " ".join(self.argv).strip()


def start_of(pid: int, proc: Path = PROC) -> int | None:
    """Return the start time of a live process in clock ticks since boot; None if it is dead.

    A zombie is dead: it serves nothing.
    """
    fields = _stat(proc / str(pid))
    return fields[1] if fields else None


def alive(pid: int, start: int, proc: Path = PROC) -> bool:
    """Return whether that very process lives: a reused pid has another start time."""
    return start_of(pid, proc) == start


def vllm_processes(proc: Path = PROC) -> list[Proc]:
    """Return every live vLLM process of this PID namespace, this process excepted.

    Processes of other users that cannot be read are left out.
    """
    raws = {raw.pid: raw for raw in _read_all(proc)}

    @cache
    def judge(pid: int) -> tuple[str, bool] | None:
        raw = raws.get(pid)
        return _evidence(raw, judge(raw.ppid) is not None) if raw else None

    found = []
    for raw in raws.values():
        if evidence := judge(raw.pid):
            why, loaded = evidence
            title = raw.title
            found.append(
                Proc(
                    pid=raw.pid,
                    start=raw.start,
                    title=title,
                    role=role_of(title),
                    ppid=raw.ppid,
                    why=why,
                    state=_state(raw, loaded),
                    plan=_plan_of(raw, raws),
                )
            )
    return sorted(found, key=lambda process: process.pid)


def _evidence(raw: _Raw, parent_is_vllm: bool) -> tuple[str, bool] | None:
    """Return (why it is a vLLM process, whether vLLM is loaded in it), or None if it is not."""
    command = parse_python(raw.argv)
    if _is_overlay(command):
        return None
    if raw.library:
        return f"maps {raw.library}", True
    if raw.argv and TITLE.match(raw.argv[0]):
        return f"title {raw.argv[0].split()[0]}", True
    if command.names_vllm():
        return f"command line {command.kind} {command.target.strip()[:60]!r}", raw.torch
    if CHILD.search(raw.title):
        if parent_is_vllm:
            return f"multiprocessing child of {raw.ppid}", raw.torch
        if raw.environ is not None and PLAN_VARIABLE in raw.environ:
            return f"multiprocessing child with {PLAN_VARIABLE}", raw.torch
    return None


def _state(raw: _Raw, loaded: bool) -> str:
    if parse_python(raw.argv).skips_site:
        return "without plan"  # python -S reads no .pth file, whatever the environment says
    if raw.environ is not None and PLAN_VARIABLE not in raw.environ:
        return "without plan"
    return "running" if loaded else "starting"


def _plan_of(raw: _Raw | None, raws: Mapping[int, _Raw]) -> Path | None:
    """Return the plan in the environment of the process or of its nearest readable ancestor."""
    while raw is not None:
        if raw.environ is not None:
            value = raw.environ.get(PLAN_VARIABLE)
            return Path(value) if value else None
        raw = raws.get(raw.ppid)
    return None


@dataclass(frozen=True)
class Command:
    """What a command line asks Python to run: kind ``-c``, ``-m``, ``script`` or nothing."""

    kind: str = ""
    target: str = ""
    skips_site: bool = False

    def names_vllm(self) -> bool:
        """Return whether this runs vLLM's own command or a program that imports vLLM."""
        if self.kind == "-m":
            return self.target == "vllm" or self.target.startswith("vllm.")
        if self.kind == "-c":
            return bool(IMPORT.search(self.target))
        if self.kind == "script":
            path = Path(self.target)
            return path.name == "vllm" or path.parent.name == "vllm" or _script_imports(path)
        return False


def parse_python(argv: tuple[str, ...]) -> Command:
    """Read a Python command line as the interpreter does; an empty Command for anything else."""
    if not argv:
        return Command()
    if not PYTHON.match(Path(argv[0]).name):
        # `exec -a` and some launchers name the console script itself.
        named = Path(argv[0]).name in ("vllm", "vllm-overlay")
        return Command("script", argv[0]) if named else Command()
    skips_site, words = False, iter(argv[1:])
    for word in words:
        if not word.startswith("-") or word == "-":
            return Command("script", word, skips_site)
        if word.startswith("--"):
            continue
        for index, letter in enumerate(word[1:], start=1):
            if letter in "cm":
                return Command(f"-{letter}", word[index + 1 :] or next(words, ""), skips_site)
            skips_site = skips_site or letter == "S"
            if letter in VALUE_OPTIONS:
                if not word[index + 1 :]:
                    next(words, "")
                break
    return Command(skips_site=skips_site)


def _is_overlay(command: Command) -> bool:
    if command.kind == "-m":
        return command.target.split(".")[0] == "vllm_overlay"
    path = Path(command.target)
    return command.kind == "script" and (path.name == "vllm-overlay" or PACKAGE in path.parents)


def _script_imports(path: Path) -> bool:
    if not path.is_absolute():
        return False  # relative to a folder of that process; its effects still show
    try:
        with path.open("rb") as file:
            return bool(IMPORT.search(file.read(SCRIPT_BYTES).decode(errors="replace")))
    except OSError:
        return False


def _read_all(proc: Path) -> Iterator[_Raw]:
    for folder in proc.iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                raw = _read(folder)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            if raw:
                yield raw


def _read(folder: Path) -> _Raw | None:
    fields = _stat(folder)
    if fields is None or _other_namespace(folder):
        return None
    ppid, start = fields
    line = (folder / "cmdline").read_bytes().rstrip(b"\0")
    argv = tuple(word.decode(errors="replace") for word in line.split(b"\0"))
    try:
        maps = (folder / "maps").read_bytes()
        environ = _environ((folder / "environ").read_bytes(), bool(TITLE.match(argv[0])))
    except PermissionError:
        if folder.stat().st_uid != os.geteuid():
            return None
        maps, environ = b"", None
    return _Raw(
        pid=int(folder.name),
        start=start,
        ppid=ppid,
        argv=argv,
        environ=environ,
        library=_library(maps, folder / "root"),
        torch=b"/libtorch" in maps,
    )


def _library(maps: bytes, root: Path) -> str | None:
    """Return a mapped shared object that lies in a package named vllm.

    A folder of that name is not enough: it may be a checkout, or hold a whole environment.
    """
    packages = {match[2]: match[1] for match in LIBRARY.finditer(maps)}
    for package, library in packages.items():
        if (root / os.fsdecode(package).lstrip("/") / "__init__.py").is_file():
            return library.decode(errors="replace")
    return None


def _stat(folder: Path) -> tuple[int, int] | None:
    """Return (parent pid, start time); None for a dead process, a zombie or a kernel thread."""
    try:
        text = (folder / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold spaces and parentheses.
    fields = text.rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X") or int(fields[6]) & KERNEL_THREAD:
        return None
    return int(fields[1]), int(fields[19])


def _other_namespace(folder: Path) -> bool:
    """Return whether the process lives in a nested PID namespace, such as a container's."""
    for line in (folder / "status").read_text(errors="replace").splitlines():
        if line.startswith("NSpid:"):
            return len(line.split()) > 2
    return False


def _environ(data: bytes, titled: bool) -> dict[str, str] | None:
    """Return the environment that the process was started with; None if a title overwrote it."""
    pairs = (item.partition(b"=") for item in data.split(b"\0") if b"=" in item)
    found = {name.decode(errors="replace"): os.fsdecode(value) for name, _, value in pairs}
    if titled and PLAN_VARIABLE not in found:
        return None  # what a title left over proves nothing
    return found or None
