"""A real server: the fixes are in every process, and `health` tells when that ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.fixes import write_fix, write_recipe
from tests.support.node import wait_for
from tests.support.serving import (
    COMMAND,
    Server,
    chat,
    environment,
    free_port,
    serving,
    share_facts,
)

IMPORTS_VLLM = "import vllm.envs, sys; print('up', flush=True); sys.stdin.read()"


def receipts(server: Server) -> dict[str, dict[str, str]]:
    """Return {role: {fix: state}} of the live processes, from the files that they wrote.

    vLLM asks its model registry in a process of its own, which leaves a receipt and is gone.
    """
    files = (server.plan.parent / "receipts").glob("*.json")
    found = [json.loads(file.read_text()) for file in files]
    live = {server.pid, *(child.pid for child in server.children())}
    return {
        item["role"]: {fix["name"]: fix["state"] for fix in item["fixes"]}
        for item in found
        if item["pid"] in live
    }


def health(server: Server) -> tuple[int, str]:
    done = server.cli("health", "--json")
    return done.returncode, " ".join(json.loads(done.stdout)["reasons"])


def test_it_answers(server: Server) -> None:
    answer = chat(server.url, "What is the capital of France?")
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


def test_every_process_wrote_a_receipt(server: Server) -> None:
    found = receipts(server)
    assert set(found) == {"api-server", "engine-core", "worker"}
    assert found["api-server"] == {"truncate-to-fit": "applied", "overlay-route": "applied"}


def test_vllm_knows_the_plans_variables(server: Server) -> None:
    # The server runs with --fail-on-environ-validation: it would have ended otherwise.
    assert "--fail-on-environ-validation" in " ".join(psutil.Process(server.pid).cmdline())
    assert "Unknown vLLM environment variable" not in server.log.read_text()


def test_status_shows_processes_and_fixes(server: Server) -> None:
    done = server.cli("status", "--json")
    assert done.returncode == 0 and str(server.pid) in done.stdout
    table = server.cli("status").stdout
    for word in ("api-server", "engine-core", "worker", "truncate-to-fit", "overlay-route"):
        assert word in table


def test_healthy(server: Server) -> None:
    assert health(server) == (0, "")


@pytest.mark.parametrize("options", [[], ["-S"]])
def test_a_vllm_process_without_the_plan_is_noticed(server: Server, options: list[str]) -> None:
    """One that was started without the plan's variable, and one that ignores .pth files."""
    paths = [path for path in sys.path if path.endswith("site-packages")]
    code = f"import sys; sys.path += {paths!r}; {IMPORTS_VLLM}"
    plan = {"VLLM_OVERLAY_PLAN": str(server.plan)} if options else {}
    process = subprocess.Popen(
        [sys.executable, *options, "-c", code],
        env={**environment(server.home), **plan},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        status, reasons = health(server)
        assert status == 1 and str(process.pid) in reasons
    finally:
        process.communicate(timeout=30)
    assert health(server) == (0, "")


def test_a_dead_engine_is_noticed_and_nothing_is_left(tmp_path: Path) -> None:
    with serving("demo", tmp_path) as server:
        assert health(server) == (0, "")
        children = server.children()
        (engine,) = [item for item in children if "EngineCore" in " ".join(item.cmdline())]
        engine.kill()
        engine.wait(timeout=30)
        status, reasons = health(server)
        assert status == 1 and reasons
    assert not psutil.wait_procs(children, timeout=10)[1]


def serve_hook(tmp_path: Path, module: str, error: str) -> subprocess.CompletedProcess[str]:
    """Serve a recipe whose one fix hooks a module and raises; return how that ended."""
    share_facts(tmp_path)
    code = f"def install(module):\n    raise {error}\n"
    hooks = {module: "hooks.py:install"}
    write_fix(tmp_path / "fixes", "bad-hook", {"hooks.py": code}, hooks=hooks)
    recipe = write_recipe(tmp_path, fixes=["bad-hook"])
    done = subprocess.run(
        [COMMAND, "serve", str(recipe), "--", "--port", str(free_port())],
        env=environment(tmp_path, {"VLLM_OVERLAY_FIXES": str(tmp_path / "fixes")}),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 78, done.stderr[-3000:]
    return done


def test_a_hook_that_fails_in_the_worker_ends_the_server(tmp_path: Path) -> None:
    """vLLM turns the end of a worker into status 1; the overlay's is 78, with its own line."""
    module = "vllm.v1.worker.cpu_model_runner"
    done = serve_hook(tmp_path, module, "ImportError('not on this machine')")
    (line,) = [line for line in done.stderr.splitlines() if "not on this machine" in line]
    assert line.startswith("vllm-overlay: ") and "bad-hook" in line and module in line


def test_a_hook_that_fails_after_the_model_has_loaded_leaves_no_engine(tmp_path: Path) -> None:
    """The API server imports its routes last; EngineCore would outlive it with all its memory."""
    module = "vllm.entrypoints.serve.instrumentator.metrics"
    assert "too late" in serve_hook(tmp_path, module, "RuntimeError('too late')").stderr
    receipts = [json.loads(path.read_text()) for path in tmp_path.glob("plans/*/receipts/*.json")]
    assert {item["role"] for item in receipts} >= {"engine-core", "worker"}
    ended = [item["pid"] for item in receipts]
    # Killed before the server ended; the kernel may take a moment for their memory.
    wait_for(lambda: not any(map(psutil.pid_exists, ended)), "the end of every process", 10)
