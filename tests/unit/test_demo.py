"""The demo's terminal, with a stand-in for `vllm-overlay`; tests/engine has the real one."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from vllm_overlay.background import answers

STAND_IN = """#!{python}
import http.server, json, os, pathlib, signal, subprocess, sys
HERE = pathlib.Path(__file__).parent
command = sys.argv[1]
if command == "plan":
    if "plan" in {refuse!r}:
        print("vllm-overlay: demo.yaml:3:1: unknown key", file=sys.stderr)
        sys.exit(78)
    print(json.dumps({{"serve": {{"host": "127.0.0.1", "port": {port}}}, "served_model": "demo"}}))
elif command == "serve":
    (HERE / "argv").write_text(" ".join(sys.argv[1:]))
    if "serve" in {refuse!r}:
        print("vllm-overlay: the port is taken", file=sys.stderr)
        sys.exit(78)
    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, body):
            self.send_response(200); self.end_headers(); self.wfile.write(body)
        def do_GET(self):
            self.answer(b"")
        def do_POST(self):
            text = json.dumps({{"choices": [{{"message": {{"content": "It is Paris."}}}}]}})
            self.answer(text.encode())
    def drained(*_):
        (HERE / "drained").touch()
        os._exit(0)
    signal.signal(signal.SIGTERM, drained)
    worker = subprocess.Popen(["sleep", "600"])
    (HERE / "pids").write_text(f"{{os.getpid()}} {{worker.pid}}")
    http.server.ThreadingHTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
else:
    print(f"this is {{command}}")
    sys.exit({refuse!r} == command)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_demo(folder: Path, refuse: str = "") -> subprocess.Popen[str]:
    """Start the demo with a stand-in that refuses one command."""
    (folder / "home" / "models" / "smollm2-135m-instruct").mkdir(parents=True)
    command = folder / "vllm-overlay"
    port = free_port()
    command.write_text(STAND_IN.format(python=sys.executable, port=port, refuse=refuse))
    command.chmod(0o755)
    code = (
        "import pathlib, sys, vllm_overlay.demo.__main__ as demo;"
        f"demo.COMMAND = pathlib.Path({str(command)!r}); sys.exit(demo.main([]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "VLLM_OVERLAY_HOME": str(folder / "home")},
    )


def read_until(stream: Iterator[str], text: str) -> str:
    seen = ""
    for line in stream:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"no {text!r} in: {seen}")


def test_it_shows_an_answer_and_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = start_demo(tmp_path)
    assert demo.stdout
    seen = read_until(demo.stdout, "Serving until Ctrl-C")
    assert "It is Paris." in seen
    assert seen.index("this is health") < seen.index("It is Paris.") < seen.index("this is status")
    assert "curl -s http://127.0.0.1:" in seen
    assert (tmp_path / "argv").read_text() == "serve demo"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    demo.send_signal(signal.SIGINT)
    assert demo.wait(30) == 0
    assert (tmp_path / "drained").exists()
    assert not [pid for pid in pids if psutil.pid_exists(pid) and alive(pid)]


def alive(pid: int) -> bool:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_server_that_ends_is_shown_with_its_last_lines_and_status(tmp_path: Path) -> None:
    out, err = start_demo(tmp_path, refuse="serve").communicate(timeout=60)
    assert "the port is taken" in err
    assert "exit status 78" in err
    assert str(tmp_path / "home" / "logs") in out


def test_a_refused_plan_starts_nothing(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, refuse="plan")
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 78
    assert err == "vllm-overlay: demo.yaml:3:1: unknown key\n"
    assert not (tmp_path / "argv").exists()


def test_an_unhealthy_server_is_stopped(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, refuse="health")
    out, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "this is health" in out
    assert "Paris" not in out
    assert (tmp_path / "drained").exists()


@pytest.fixture
def somebody() -> Iterator[str]:
    """A server of this process that answers 200; yields its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_another_server_on_the_port_does_not_count(somebody: str) -> None:
    assert answers(os.getpid(), somebody)
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(flush=True); input()"
    command = [sys.executable, "-c", listen]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        assert not answers(other.pid, somebody)
        other.kill()
