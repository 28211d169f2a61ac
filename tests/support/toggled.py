"""`vllm-overlay bench` with stand-ins for the server and for vLLM's client; all else is real.

Run as a program: ``toggled.py FOLDER ARGUMENTS…``. In the folder, ``faults`` names what goes wrong.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.support.fake_server import FakeServer, serving_fake  # noqa: E402
from tests.support.node import BARE, READY, Node  # noqa: E402

FIX, FLAG = "overlay-route", "VLLM_OVERLAY_ROUTE"
VALUES = {"1": "on", "0": "off"}


def faults(folder: Path) -> set[str]:
    return set((folder / "faults").read_text().split(","))


def note(folder: Path, name: str) -> None:
    """Leave the pid of a stand-in."""
    with (folder / "pids").open("a") as file:
        file.write(f"{name} {os.getpid()}\n")


class Patient(FakeServer):
    """Answers the client only when /metrics has been asked meanwhile."""

    def __init__(self, wrong: set[str]) -> None:
        super().__init__(wrong)
        self.looked = threading.Event()
        self.before_answer = self.wait

    def wait(self) -> None:
        if self.requests[-1].get("ignore_eos"):
            self.looked.clear()
            self.looked.wait(60)

    def metrics(self) -> str:
        text = super().metrics()
        if self.running:
            self.looked.set()
        return text


# --- the stand-in of `vllm-overlay serve`, and of the vLLM that it becomes ---


def serve(folder: Path) -> None:
    """Take the place of vLLM's API server; a second process is its engine."""
    wrong, side = faults(folder), VALUES[os.environ[FLAG]]
    (folder / "argv").write_text(" ".join(sys.argv[3:]))
    note(folder, side)
    if "refused" in wrong:
        print("vllm-overlay: the port is taken")
        sys.exit(78)
    if "dies" in wrong or f"dies {side}" in wrong:
        print("RuntimeError: no memory")
        sys.exit(1)
    if "slow" in wrong:
        signal.pause()
    plan = json.loads((folder / f"{side}.json").read_text())
    os.environ["VLLM_OVERLAY_PLAN"] = plan["path"]
    words = ["VLLM::APIServer_0", __file__, str(folder), "become", side, BARE]
    os.execv(BARE, words)


def become(folder: Path, side: str, python: str) -> None:
    """Be what `serve` becomes: under this title, Python does not know its own path."""
    wrong = faults(folder)
    path = Path(os.environ["VLLM_OVERLAY_PLAN"])
    plan = json.loads(path.read_text())
    node = Node(folder, port=plan["serve"]["port"], digest=plan["digest"])
    applied = side == "on"
    if f"wrong {side}" in wrong:
        applied = not applied
    if "other plan" in wrong:
        node.digest = "b" * 64
    states = {"name": FIX, "state": "applied", "modules": {"vllm.a": "applied"}}
    words = ["VLLM::EngineCore", "-c", READY]
    with subprocess.Popen(words, executable=python, stdout=subprocess.PIPE) as engine:
        assert engine.stdout
        engine.stdout.readline()
        for pid in (os.getpid(), engine.pid):
            node.see(pid)
            node.write_receipt(pid, fixes=[states] if applied else [])
        with (folder / "pids").open("a") as file:
            file.write(f"engine {engine.pid}\n")
        whole = path.read_bytes()
        node.write_run(os.getpid())  # writes a plan of its own too
        (node.folder / "plan.json").write_bytes(whole)
        with serving_fake(Patient(wrong), node.port):
            signal.pause()


# --- the stand-in of `vllm bench serve` ---


def client(folder: Path, words: list[str]) -> None:
    """Ask for one answer, and write the result that vLLM's client would write."""
    import urllib.request

    wrong = faults(folder)
    note(folder, "client")
    if "client dies" in wrong:
        sys.exit("ValueError: no such tokenizer")
    if "client hangs" in wrong:
        (folder / "hangs").touch()
        signal.pause()

    def given(option: str) -> str:
        return words[words.index(option) + 1]

    body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
    url = given("--base-url") + "/v1/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())).read()
    asked = int(given("--num-prompts"))
    rate = 40.0 if os.environ[FLAG] == "1" else 20.0
    if "server dies" in wrong:
        os.kill(int((folder / "pids").read_text().split()[1]), signal.SIGKILL)
    result = {
        "completed": asked - ("requests fail" in wrong),
        "duration": 1.0,
        "output_throughput": rate * asked * ("no tokens" not in wrong),
        "total_token_throughput": 100.0,
        "median_ttft_ms": 1.0,
        "median_itl_ms": 2.0,
    }
    Path(given("--result-dir"), given("--result-filename")).write_text(json.dumps(result))
    with (folder / "clients").open("a") as out:
        out.write(json.dumps(words) + "\n")


# --- the command, with the stand-ins in place ---


def plan_of(home: Path, port: int, value: str) -> Any:
    from vllm_overlay.plan import Plan, PlannedFix

    targets = ({"kind": "hook", "module": "vllm.a", "symbols": []},)
    verdict = "apply" if value == "1" else "off"
    return Plan(
        cache_key="0123456789abcdef",
        recipe={"name": "demo", "file": "demo.yaml", "variant": None},
        folders={}, vllm={"version": "9.9.0", "path": str(home / "vllm"), "torch": "none"},
        model="m", served_model="demo", serve={"port": port, "max-model-len": 512}, env={},
        fixes=(PlannedFix(FIX, verdict, FLAG, value, "environment", (), targets, "0"),),
        overrides=(), requires={}, modules={},
        smoke={"expect": [{"prompt": "What is the capital of France?", "contains": "Paris"}]},
    )  # fmt: skip


def run(folder: Path, arguments: list[str]) -> None:
    from tests.support.serving import free_port
    from vllm_overlay import cli
    from vllm_overlay.bench import load, sides, toggle
    from vllm_overlay.plan import write_plan

    home, port = folder / "home", free_port()

    def both(request: Any, fix: str, tokens: int) -> list[sides.Side]:
        made = []
        for value, name in VALUES.items():
            plan = plan_of(home, port, value)
            path = write_plan(plan, home)
            (folder / f"{name}.json").write_text(json.dumps({"path": str(path)}))
            made.append(sides.Side(name, fix, FLAG, value, plan, {**os.environ, FLAG: value}))
        return made

    (folder / "proc").mkdir(exist_ok=True)
    sides.both_sides = both
    toggle.COMMAND = script(folder, "server", "serve")
    load.vllm_script = lambda: str(script(folder, "client", "client"))
    load.POLL = 0.01
    for name in ("check", "check_processes", "status_rows"):
        real = getattr(toggle, name)
        setattr(toggle, name, functools.partial(real, proc=folder / "proc"))
    sys.argv = ["vllm-overlay", *arguments]
    cli.main()


def script(folder: Path, name: str, what: str) -> Path:
    """Write a program that runs a function of this file in a Python without the overlay."""
    file = folder / name
    file.write_text(f'#!/bin/sh\nexec {BARE} {__file__} {folder} {what} "$@"\n')
    file.chmod(0o755)
    return file


def start(folder: Path, wrong: str, *arguments: str) -> subprocess.Popen[str]:
    """Start ``bench demo`` with these faults, and options that make it short."""
    folder.joinpath("faults").write_text(wrong)
    short = ["--streams", "1,2", "--input-len", "8", "--output-len", "2", "--rounds", "1"]
    words = ["bench", "demo", "--toggle", FIX, "--prompts-per-stream", "3", *short, *arguments]
    return subprocess.Popen(
        [sys.executable, __file__, str(folder), "run", *words],
        env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def environment(folder: Path) -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return {**kept, "VLLM_OVERLAY_HOME": str(folder / "home"), "VLLM_API_KEY": "s3cret"}


def left(folder: Path) -> list[str]:
    """Return which stand-ins still live."""
    from vllm_overlay.processes import start_of

    with suppress(FileNotFoundError):
        rows = [line.rsplit(" ", 1) for line in (folder / "pids").read_text().splitlines()]
        return [name for name, pid in rows if start_of(int(pid)) is not None]
    return []


def main() -> None:
    folder, what, rest = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    match what:
        case "run":
            run(folder, rest)
        case "serve":
            serve(folder)
        case "become":
            become(folder, *rest)
        case "client":
            client(folder, rest)


if __name__ == "__main__":
    main()
