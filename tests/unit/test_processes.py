from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.node import BARE, READY, program, wait_for
from vllm_overlay.processes import (
    PACKAGE,
    Command,
    Proc,
    alive,
    parse_python,
    start_of,
    vllm_processes,
)

PLAN = {"VLLM_OVERLAY_PLAN": "/home/plans/abc/plan.json"}
MAP = f"import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); {READY}"
PARENT = """
import multiprocessing, sys, time
def child(queue):
    queue.put(1)
    time.sleep(600)
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    context.Process(target=child, args=(queue,), daemon=True).start()
    queue.get()
    print("ready", flush=True)
    time.sleep(600)
"""


@contextmanager
def found(
    *command: str | Path, env: Mapping[str, str] | None = None, name: str | None = None
) -> Iterator[list[Proc]]:
    """Run a program and yield what is found of it and of its children."""
    with program(*command, env=env, name=name) as process:
        tree = {process.pid, *children(process.pid)}
        yield [one for one in vllm_processes() if one.pid in tree]


def children(pid: int) -> set[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(word) for word in listed} | {
        deep for word in listed for deep in children(int(word))
    }


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package vllm that can be imported and run, and a console script."""
    (tmp_path / "vllm/entrypoints").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("")
    (tmp_path / "vllm/entrypoints/__init__.py").write_text("")
    (tmp_path / "vllm/entrypoints/api_server.py").write_text(READY)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/vllm").write_text(READY)
    (tmp_path / "bin/vllm-overlay").write_text(READY)
    return tmp_path


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("VLLM::EngineCore", "engine-core"),
        ("VLLM::Worker_TP1", "worker"),
        ("VLLM::Anything", "other"),
        ("mine::EngineCore_DP0", "engine-core"),
    ],
)
def test_a_title_of_vllm_is_found(title: str, role: str) -> None:
    with found(BARE, "-c", READY, env=PLAN, name=title) as (one,):
        assert (one.role, one.state) == (role, "running")
        assert one.start == start_of(one.pid)


def test_a_mapped_library_of_vllm_is_found_whatever_the_title_says(tmp_path: Path) -> None:
    library = tmp_path / "envs/vllm/lib with space/vllm/_C.abi3.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"x" * 4096)
    (library.parent / "__init__.py").touch()
    with found(BARE, "-c", MAP, library, env=PLAN) as (one,):
        assert one.why == f"maps {library}"
        assert one.state == "running"


@pytest.mark.parametrize(
    "file",
    ["vllm/.venv/lib/site-packages/libtorch.so", "vllm/libpython.so", "vllm_x/_C.so", "x/a.txt"],
)
def test_other_mapped_files_are_not_vllm(tmp_path: Path, file: str) -> None:
    library = tmp_path / file
    library.parent.mkdir(parents=True)
    library.write_bytes(b"x" * 4096)
    with found(BARE, "-c", MAP, library) as nothing:
        assert nothing == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", f"import vllm; {READY}"),
        ("-m", "vllm.entrypoints.api_server"),
        ("bin/vllm", "serve", "model"),
        ("script.py",),
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("env", [{}, PLAN], ids=["no plan", "plan"])
def test_a_program_of_vllm_is_found(
    package: Path, arguments: tuple[str, ...], env: Mapping[str, str]
) -> None:
    (package / "script.py").write_text(f"from vllm import entrypoints\n{READY}")
    words = [str(package / word) if (package / word).is_file() else word for word in arguments]
    environ = {"PYTHONPATH": str(package), **env}
    with found(BARE, *words, env=environ) as (one,):
        assert one.state == ("starting" if env else "without plan")
        assert one.plan == (Path(PLAN["VLLM_OVERLAY_PLAN"]) if env else None)


def test_a_program_that_has_loaded_torch_has_loaded_vllm(package: Path) -> None:
    library = package / "libtorch_cpu.so"
    library.write_bytes(b"x" * 4096)
    with found(BARE, "-c", f"import vllm\n{MAP}", library, env=PLAN | path(package)) as (one,):
        assert one.state == "running"


def path(package: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(package)}


@pytest.mark.parametrize("options", [("-S",), ("-uS",), ("-X", "dev", "-S")])
def test_a_python_that_skips_site_has_no_overlay(package: Path, options: tuple[str, ...]) -> None:
    code = f"import vllm; {READY}"
    with found(BARE, *options, "-c", code, env=PLAN | path(package)) as (one,):
        assert one.state == "without plan"


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_of_multiprocessing_are_found_and_its_tracker_is_not(
    package: Path, method: str
) -> None:
    script = package / "bin/vllm"
    script.write_text(PARENT)
    with found(BARE, script, method, env=PLAN) as processes:
        titles = [one.title for one in processes]
        assert len(processes) == {"spawn": 2, "forkserver": 3, "fork": 2}[method], titles
        assert not any("resource_tracker" in title for title in titles)
        assert {one.state for one in processes} == {"starting"}
    with found(BARE, script, method) as processes:
        assert {one.state for one in processes} == {"without plan"}


def test_children_of_other_programs_are_not_vllm(tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text(PARENT)
    with found(BARE, script, "spawn") as nothing:
        assert nothing == []


def test_an_orphan_with_the_plan_is_found(tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text(PARENT)
    with program(BARE, script, "spawn", env=PLAN) as process:
        tree = children(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kept = [one for one in vllm_processes() if one.pid in tree]
        assert len(kept) == 1
        assert kept[0].why == "multiprocessing child with VLLM_OVERLAY_PLAN"


def test_a_program_that_imports_only_the_overlay_is_not_found() -> None:
    root = str(Path(__file__).parents[2])
    code = f"import vllm_overlay\n{READY}"
    with found(BARE, "-c", code, env={"PYTHONPATH": root}) as nothing:
        assert nothing == []


def test_our_own_command_is_not_found(package: Path) -> None:
    with found(BARE, package / "bin/vllm-overlay", "plan", "vllm", env=PLAN) as nothing:
        assert nothing == []


def test_our_own_look_at_vllm_s_parser_is_not_found() -> None:
    script = PACKAGE / "parserdump.py"
    with subprocess.Popen([BARE, script], stdin=subprocess.PIPE, env={}) as process:
        command = Path(f"/proc/{process.pid}/cmdline")
        wait_for(lambda: str(script).encode() in command.read_bytes(), "it has been started")
        assert process.pid not in [one.pid for one in vllm_processes()]
        process.kill()


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen([BARE, "-c", "pass"])
    wait_for(
        lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z",
        "a zombie",
    )
    assert start_of(process.pid) is None
    process.wait()


def test_a_reused_pid_is_another_process() -> None:
    start = start_of(os.getpid())
    assert start is not None
    assert alive(os.getpid(), start)
    assert not alive(os.getpid(), start - 1)


def test_a_title_that_has_overwritten_the_environment_hides_no_plan(package: Path) -> None:
    """The plan is then that of the parent: the environment of a child was the parent's."""
    child = f"import subprocess, sys; subprocess.Popen(['VLLM::Worker', '-c', '''{READY}'''],"
    script = package / "bin/vllm"
    script.write_text(
        f"{child} executable=sys.executable, env={{'LEFT': 'over'}})\nimport time; time.sleep(600)"
    )
    with found(BARE, script, env=PLAN) as (parent, worker):
        assert worker.title.startswith("VLLM::Worker")
        assert worker.plan == parent.plan == Path(PLAN["VLLM_OVERLAY_PLAN"])
        assert worker.state == "running"


def test_a_process_of_a_container_belongs_to_another_node(tmp_path: Path) -> None:
    with program(BARE, "-c", READY, name="VLLM::Worker") as process:
        folder = tmp_path / str(process.pid)
        folder.mkdir()
        for name in ("stat", "cmdline", "maps", "environ", "status"):
            (folder / name).write_bytes(Path(f"/proc/{process.pid}/{name}").read_bytes())
        assert len(vllm_processes(tmp_path)) == 1
        status = (folder / "status").read_text()
        (folder / "status").write_text(
            status.replace(f"NSpid:\t{process.pid}", f"NSpid:\t{process.pid}\t7")
        )
        assert vllm_processes(tmp_path) == []


@pytest.mark.parametrize("mine", [True, False])
def test_an_unreadable_process_counts_only_if_it_is_ours(
    mine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with program(BARE, "-c", READY, name="VLLM::Worker") as process:
        hidden = Path(f"/proc/{process.pid}/maps")
        read = Path.read_bytes

        def guarded(file: Path) -> bytes:
            if file == hidden:
                raise PermissionError(file)
            return read(file)

        monkeypatch.setattr(Path, "read_bytes", guarded)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() if mine else 4711)
        assert (process.pid in [one.pid for one in vllm_processes()]) is mine


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python3 -m vllm.x", Command("-m", "vllm.x")),
        ("/usr/bin/python3.11 -mvllm", Command("-m", "vllm")),
        ("python -Sc pass", Command("-c", "pass", True)),
        ("python -IuX dev -W ignore script.py -S", Command("script", "script.py")),
        ("python --check-hash-based-pycs never", Command("script", "never")),
        ("python -", Command("script", "-")),
        ("python", Command()),
        ("python -c", Command("-c", "")),
        ("/x/bin/vllm serve m", Command("script", "/x/bin/vllm")),
        ("bash -c vllm", Command()),
        ("", Command()),
    ],
)
def test_a_python_command_line_is_read_as_python_reads_it(line: str, expected: Command) -> None:
    assert parse_python(tuple(line.split())) == expected
