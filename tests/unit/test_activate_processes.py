"""Activation across processes: spawn, fork, forkserver, receipts, and the main process's status."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.sandbox import Sandbox
from vllm_overlay.activate.receipt import environment_digest, role_of

EDIT = ("edit-it", "vllm.sampler", "'stock'", "'patched'")
CHILD = """
import multiprocessing, sys
def work(queue):
    from vllm.user import greet
    queue.put(greet())
if __name__ == "__main__":
    method, preload = sys.argv[1:]
    if preload == "preload":
        import vllm.user
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start(); print(queue.get(timeout=30), child.pid); child.join()
"""


@pytest.mark.parametrize("preload", ["preload", "bare"])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_are_patched_and_write_receipts(
    sandbox: Sandbox, method: str, preload: str
) -> None:
    sandbox.edit(*EDIT)
    script = sandbox.root / "main.py"
    script.write_text(CHILD)
    run = sandbox.run(str(script), method, preload)
    word, pid = run.stdout.split()
    assert word == "patched", run.stderr
    (receipt,) = [item for item in sandbox.receipts() if item["pid"] == int(pid)]
    assert receipt["fixes"] == [
        {"name": "edit-it", "state": "applied", "modules": {"vllm.sampler": "applied"}}
    ]
    assert len(sandbox.receipts()) == (2 if preload == "preload" else 1)


def test_receipt_says_what_is_applied_and_what_waits(sandbox: Sandbox) -> None:
    sandbox.edit(*EDIT)
    sandbox.added("new", "vllm.extra", "X = 1\n")
    run = sandbox.code("import os, vllm.sampler; print(os.getpid())")
    (receipt,) = sandbox.receipts()
    assert receipt["pid"] == int(run.stdout)
    assert {fix["name"]: fix["state"] for fix in receipt["fixes"]} == {
        "edit-it": "applied",
        "new": "waiting",
    }
    assert receipt["vllm"] == {"version": "9.9.0", "path": f"{sandbox.site}/vllm"}
    assert sandbox.plan_path is not None and receipt["plan"] == sandbox.plan_path.parent.name


def test_process_without_vllm_leaves_no_receipt(sandbox: Sandbox) -> None:
    assert sandbox.code("import json").returncode == 0
    assert sandbox.receipts() == []


def test_title_gives_the_role(sandbox: Sandbox) -> None:
    sandbox.edit(*EDIT)
    run = sandbox.code("import vllm, setproctitle; setproctitle.setproctitle('VLLM::Worker_TP1')")
    assert run.returncode == 0, run.stderr
    (receipt,) = sandbox.receipts()
    assert (receipt["role"], receipt["rank"]) == ("worker", "TP1")


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("VLLM::EngineCore", "engine-core"),
        ("mine::EngineCore_DP1", "engine-core"),
        ("VLLM::Worker", "worker"),
        ("VLLM::APIServer_0", "api-server"),
        ("VLLM::DPCoordinator", "coordinator"),
        ("/x/bin/python /x/bin/vllm serve /m", "api-server"),
        ("python -m vllm.entrypoints.cli.main serve /m", "api-server"),
        ("python -c from multiprocessing.spawn import spawn_main", "other"),
        ("tail serve", "other"),
        ("", "other"),
    ],
)
def test_roles(title: str, role: str) -> None:
    assert role_of(title) == role


def test_receipt_folder_that_cannot_be_written_ends(sandbox: Sandbox) -> None:
    sandbox.edit(*EDIT)
    folder = sandbox.write().parent
    (folder / "receipts").write_text("in the way")
    run = sandbox.code("try:\n import vllm\nexcept BaseException: pass\nprint('on')")
    assert run.returncode == 78 and run.stdout == "" and "receipt" in run.stderr


def test_full_disk_ends(sandbox: Sandbox) -> None:
    # A file-size limit of zero is how a full disk looks to one process.
    sandbox.edit(*EDIT)
    limit = (
        "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    )
    run = sandbox.code(limit + "import vllm; print('on')")
    assert run.returncode == 78 and "receipt" in run.stderr
    assert sandbox.receipts() == []


def test_process_killed_while_it_writes_leaves_no_receipt(sandbox: Sandbox) -> None:
    sandbox.edit(*EDIT)
    # Killed between writing the temporary file and putting it in place.
    run = sandbox.code(
        "import os, signal; os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL); import vllm"
    )
    assert run.returncode == -signal.SIGKILL
    assert sandbox.receipts() == []
    run = sandbox.code("import vllm.sampler")
    assert run.returncode == 0 and len(sandbox.receipts()) == 1


def as_main(sandbox: Sandbox, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that left word of itself beside the plan, as `serve` does."""
    assert sandbox.plan_path is not None
    start = (
        "import os, pathlib\n"
        "from vllm_overlay.activate.receipt import process_key\n"
        f"pid, start = process_key(); folder = pathlib.Path({str(sandbox.plan_path.parent)!r})\n"
        "(folder / 'runs').mkdir(exist_ok=True)\n"
        "(folder / 'runs' / f'{pid}-{start}.json').write_text('{}')\n"
        f"os.environ['VLLM_OVERLAY_PLAN'] = {str(sandbox.plan_path)!r}\n"
        f"os.execv({sandbox.python!r}, [{sandbox.python!r}, '-c', {code!r}])"
    )
    return sandbox.code(start, plan=False)


def test_main_process_leaves_with_78_when_a_child_was_refused(sandbox: Sandbox) -> None:
    sandbox.hook("bad-hook", "vllm.sampler", "def install(m): return {}")
    sandbox.write()
    # As vLLM does: the child ends, the parent turns that into status 1.
    main = (
        "import subprocess, sys\n"
        "run = subprocess.run([sys.executable, '-c', 'import vllm.sampler'])\n"
        "print('said'); raise SystemExit(1 if run.returncode else 0)"
    )
    assert sandbox.code(main).returncode == 1  # not the main process: no run record
    run = as_main(sandbox, main)
    assert (run.returncode, run.stdout) == (78, "said\n"), run.stderr


def test_a_failure_of_an_earlier_start_does_not_count(sandbox: Sandbox) -> None:
    plan = sandbox.write()
    (plan.parent / "failures").mkdir()
    (plan.parent / "failures" / "1-1.json").write_text("{}")
    assert as_main(sandbox, "print('fine')").returncode == 0


def test_main_process_that_is_refused_ends_its_children(sandbox: Sandbox) -> None:
    """vLLM's EngineCore does not watch its parent, and would keep its memory."""
    sandbox.hook("bad-hook", "vllm.sampler", "def install(m): return {}")
    sandbox.write()
    main = (
        "import signal, subprocess, sys\n"
        "wait = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);'\n"
        "wait += 'print(flush=True); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', wait], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True)\n"
        "import vllm.sampler"
    )
    run = as_main(sandbox, main)
    assert run.returncode == 78, run.stderr
    assert not alive(int(run.stdout))


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_environment_digest_counts_what_matters_and_no_secret() -> None:
    base = environment_digest({"VLLM_X": "1", "PATH": "/a"})
    assert base == environment_digest({"VLLM_X": "1", "PATH": "/b", "VLLM_API_KEY": "s"})
    assert base != environment_digest({"VLLM_X": "2"})
    assert base != environment_digest({"VLLM_X": "1", "NCCL_DEBUG": "INFO"})


def test_python_s_runs_unpatched_and_leaves_no_receipt(sandbox: Sandbox) -> None:
    # `python -S` reads no .pth file: that is why `health` looks for processes without receipts.
    sandbox.edit(*EDIT)
    path = f"import sys; sys.path.insert(0, {str(sandbox.site)!r}); "
    run = sandbox.run("-S", "-c", path + "import vllm.user as u; print(u.greet())")
    assert run.stdout == "stock\n" and sandbox.receipts() == []
