from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_server import FakeServer
from tests.support.node import BARE, READY, Node, program, run_of, wait_for
from vllm_overlay import health
from vllm_overlay.activate.receipt import process_key
from vllm_overlay.answer import known_answer
from vllm_overlay.health import Health, check_processes
from vllm_overlay.runs import find_run
from vllm_overlay.status import status_rows

SERVE = "vllm"  # argv[0] of the API server, which keeps its command line


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is between fork and exec: look once."""
    monkeypatch.setattr(health.check_processes, "__defaults__", (health.PROC, 0.0))


def check(node: Node, **options: Any) -> Health:
    return health.check(run_of(node), proc=node.proc, **options)


@pytest.mark.usefixtures("engine")
def test_a_whole_server_is_healthy(node: Node) -> None:
    result = check(node)
    assert result.reasons == ()
    body = result.as_dict()
    assert body["ok"] is True
    assert body["plan"] == node.digest
    assert [one["name"] for one in body["checks"]] == ["server", "processes", "answer"]
    assert "engine-core running" in body["checks"][1]["detail"]
    assert (
        body["checks"][2]["detail"]
        == f"asked {node.expect[0]['prompt']!r}: 'The capital is Paris.'"
    )


def test_no_server_is_not_healthy(tmp_path: Path) -> None:
    result = health.check(find_run(tmp_path))
    assert not result.ok
    assert result.reasons == ("no server that vllm-overlay started is running on this node",)


def test_a_killed_engine_is_noticed(node: Node, engine: int) -> None:
    assert check(node).ok
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: "Z" in Path(f"/proc/{engine}/stat").read_text().split(), "the engine is dead")
    result = check(node)
    assert result.reasons == ("no live engine-core process",)


@pytest.mark.usefixtures("engine")
def test_a_killed_worker_is_noticed(node: Node) -> None:
    with node.process("VLLM::Worker_TP1") as second:
        (worker,) = [
            int(path.name)
            for path in node.proc.iterdir()
            if (path / "cmdline").read_bytes().startswith(b"VLLM::Worker\0")
        ]
        os.kill(worker, signal.SIGKILL)
        os.kill(second, signal.SIGKILL)
        for pid in (worker, second):
            stat = Path(f"/proc/{pid}/stat")
            wait_for(lambda stat=stat: "Z" in stat.read_text().split(), "the worker is dead")
        assert check(node).reasons == ("no live worker process",)


@pytest.mark.usefixtures("engine")
def test_an_engine_of_an_earlier_server_does_not_stand_in(node: Node) -> None:
    with node.process("VLLM::APIServer_0") as later:
        start = process_key(later)[1]
        for path in node.folder.glob("runs/*.json"):
            path.unlink()
        node.write_run(later)
        reasons = check(node).reasons
    earlier = [p for p in node.folder.glob("receipts/*") if int(p.stem.split("-")[1]) < start]
    assert earlier
    assert "no live engine-core process" in reasons


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("env", [{}, None], ids=["no plan", "plan"])
def test_a_process_without_a_receipt_is_noticed(node: Node, env: dict[str, str] | None) -> None:
    with node.process("VLLM::Worker_TP1", receipt=False, env=env) as pid:
        (reason,) = check(node).reasons
        assert reason.startswith(f"process {pid} (VLLM::Worker_TP1")
        assert "a vLLM process without a receipt" in reason
    assert check(node).ok


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("option", ["-S", "-u"])
def test_a_program_that_imports_vllm_without_the_plan_is_noticed(
    node: Node, tmp_path: Path, option: str
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    # With -S, even the plan's variable is of no use: Python reads no .pth file.
    env = {"PYTHONPATH": str(tmp_path), **(node.environ if option == "-S" else {})}
    with program(BARE, option, "-c", f"import vllm; {READY}", env=env) as process:
        node.see(process.pid)
        (reason,) = check(node).reasons
        assert reason.startswith(f"process {process.pid} ")
        assert "was started without the plan" in reason


@pytest.mark.usefixtures("engine")
def test_a_receipt_from_before_an_exec_proves_nothing(node: Node, tmp_path: Path) -> None:
    """exec keeps pid and start time: `python -S` may take the place of who wrote the receipt."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    env = {"PYTHONPATH": str(tmp_path), **node.environ}
    with program(BARE, "-S", "-c", f"import vllm; {READY}", env=env) as process:
        node.see(process.pid)
        node.write_receipt(process.pid)
        (reason,) = check(node).reasons
        assert reason.startswith(f"process {process.pid} ")
        assert "was started without the plan" in reason
        rows = {row["pid"]: row for row in status_rows(node.home, node.proc)["processes"]}
    row = rows[process.pid]
    assert (row["state"], row["fixes"], row["plan"]) == ("without plan", {}, node.digest)


@pytest.mark.usefixtures("engine")
def test_a_process_that_has_not_loaded_vllm_yet_owes_no_receipt(node: Node) -> None:
    with program(BARE, "-c", f"{READY}; import vllm", env=node.environ) as process:
        node.see(process.pid)
        assert check(node).ok


@pytest.mark.usefixtures("engine")
def test_another_server_of_this_node_is_its_own_business(node: Node, tmp_path: Path) -> None:
    """Another plan of this state folder, and one of another state folder."""
    other = Node(tmp_path, digest="b" * 64)
    elsewhere = Node(tmp_path / "elsewhere", digest="c" * 64)
    with (
        other.process("VLLM::EngineCore", env={}) as first,
        elsewhere.process("VLLM::EngineCore") as second,
    ):
        node.see(second)
        assert check(node).ok
        rows = {row["pid"]: row for row in status_rows(node.home, node.proc)["processes"]}
    assert (rows[first]["plan"], rows[second]["plan"]) == (other.digest, elsewhere.digest)
    assert rows[second]["fixes"] == {"overlay-route": "applied", "other": "applied"}


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"fixes": [{"name": "other", "modules": {"vllm.c": "applied"}}]},
            "overlay-route is absent",
        ),
        (
            {
                "fixes": [
                    {"name": "overlay-route", "modules": {"vllm.a": "applied", "vllm.b": "lost"}},
                    {"name": "other", "modules": {"vllm.c": "waiting"}},
                ]
            },
            "overlay-route is lost",
        ),
        ({"start": 1}, "is not its own"),
        ({"schema": 2}, "cannot be read"),
        ({"host": "another-node"}, "without a receipt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_receipt_that_does_not_prove_the_fixes_is_noticed(
    node: Node, changed: dict[str, Any], said: str
) -> None:
    with node.process("VLLM::Worker_TP1", **changed):
        (reason,) = check(node).reasons
        assert said in reason


@pytest.mark.usefixtures("engine")
def test_a_module_that_a_process_has_not_imported_may_wait(node: Node) -> None:
    fixes = [
        {"name": name, "modules": dict.fromkeys(modules, "waiting")}
        for name, modules in node.fixes.items()
    ]
    with node.process("VLLM::Worker_TP1", fixes=fixes):
        assert check(node).ok


@pytest.mark.usefixtures("engine")
def test_a_corrupt_receipt_of_a_dead_process_is_no_reason(node: Node) -> None:
    (node.folder / "receipts/999999999-5.json").write_text("{")
    assert check(node).ok


def test_a_refused_process_is_noticed_and_an_earlier_run_s_is_not(node: Node, engine: int) -> None:
    start = process_key(engine)[1]
    node.write_failure(7, 1, "of an earlier run")
    assert check(node).ok
    node.write_failure(8, start + 5, "fix x: expected a, found b")
    assert check(node).reasons == (
        "process 8 was ended by its overlay: fix x: expected a, found b",
    )


@pytest.mark.usefixtures("engine")
def test_what_another_host_left_in_a_shared_folder_is_its_own(node: Node) -> None:
    pid, start = process_key()
    later = start * 2  # its clock is its own
    path = node.write_receipt(pid, start=later, host="another-node", role="coordinator")
    path.rename(path.with_name(f"{pid}-{later}.json"))
    node.write_failure(8, later, "of another node", host="another-node")
    assert check(node).reasons == ()


@pytest.mark.usefixtures("engine")
def test_a_child_between_fork_and_receipt_is_given_time(node: Node) -> None:
    with node.process("VLLM::Worker_TP1", receipt=False) as pid:
        timer = threading.Timer(0.2, node.write_receipt, (pid,))
        timer.start()
        result = check_processes(run_of(node), node.proc, settle=30.0)
        timer.join()
        assert result.ok


# The HTTP side


@pytest.mark.usefixtures("engine")
def test_a_server_that_says_it_is_sick_is_believed_and_asked_nothing(
    node: Node, server: FakeServer
) -> None:
    server.faults.add("sick")
    assert check(node).reasons == (f"vLLM's {server.url}/health answered 503",)
    assert server.requests == []


@pytest.mark.usefixtures("engine")
def test_a_server_that_is_not_there_is_noticed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(node)
    for path in node.folder.glob("runs/*.json"):
        path.unlink()
    node.port = 1
    node.write_run(run.pid)
    (reason,) = check(node).reasons
    assert "http://127.0.0.1:1/health: no answer: [Errno 111] Connection refused" in reason


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nonsense", "'The capital is Rome.', expected an answer with 'Paris'"),
        ("dead", "status 500: EngineDeadError"),
    ],
)
def test_a_wrong_answer_is_noticed_and_is_not_kept(
    node: Node, server: FakeServer, fault: str, said: str
) -> None:
    server.faults.add(fault)
    (reason,) = check(node).reasons
    assert said in reason
    server.faults.clear()
    assert check(node).ok


@pytest.mark.usefixtures("engine")
def test_an_engine_that_never_answers_is_noticed(node: Node, server: FakeServer) -> None:
    stop = threading.Event()
    server.before_answer = lambda: stop.wait(60) and None
    try:
        (reason,) = check(node, patience=0.3).reasons
    finally:
        stop.set()
    assert "no answer within 0.3 s" in reason


@pytest.mark.usefixtures("engine")
def test_a_good_answer_is_believed_for_a_while(node: Node, server: FakeServer) -> None:
    assert check(node).ok
    assert check(node).ok
    assert len(server.requests) == 1
    assert check(node, fresh=0).ok
    assert len(server.requests) == 2


@pytest.mark.usefixtures("engine")
def test_never_more_than_one_answer_is_in_flight(node: Node, server: FakeServer) -> None:
    """Callers wait for the one that asks, and share its result, whatever it is."""
    server.faults.add("nonsense")
    hold, run, results = threading.Event(), run_of(node), []
    server.before_answer = lambda: hold.wait(30) and None
    callers = [threading.Thread(target=lambda: results.append(known_answer(run))) for _ in range(4)]
    for caller in callers:
        caller.start()
    path = str(node.folder / "runs")
    wait_for(lambda: sum(name.startswith(path) for name in open_files()) == 4, "all four are there")
    wait_for(lambda: server.running == 1, "one asks")
    hold.set()
    for caller in callers:
        caller.join()
    assert [result.ok for result in results] == [False] * 4
    assert (len(server.requests), server.most) == (1, 1)


def open_files() -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("engine")
def test_a_caller_uses_a_fresh_answer_while_another_is_asked_for(
    node: Node, server: FakeServer
) -> None:
    run, hold = run_of(node), threading.Event()
    assert known_answer(run).ok
    server.before_answer = lambda: hold.wait(30) and None
    other = threading.Thread(target=known_answer, args=(run, 0.0))
    other.start()
    wait_for(lambda: server.running == 1, "another asks")
    assert known_answer(run).ok
    late = known_answer(run, fresh=0.0, patience=0.2)
    assert "has been waiting for an answer" in late.detail
    hold.set()
    other.join()


@pytest.mark.usefixtures("engine")
def test_a_base_model_is_asked_without_a_chat(node: Node, server: FakeServer) -> None:
    server.faults.add("no chat")
    assert check(node).ok
    assert [request["path"] for request in server.requests] == [
        "/v1/chat/completions",
        "/v1/completions",
    ]


def test_without_a_known_answer_one_token_will_do(node: Node, server: FakeServer) -> None:
    node.expect = []
    with node.process("VLLM::APIServer_0") as root, node.process("VLLM::EngineCore"):
        node.write_run(root)
        assert check(node).ok
        assert server.requests[0]["max_tokens"] == 1
        server.faults.add("silent")
        (reason,) = check(node, fresh=0).reasons
    assert "expected any answer" in reason


@pytest.mark.usefixtures("engine")
def test_the_key_of_the_server_is_used_and_a_proxy_is_not(
    node: Node, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    result = check(node)
    assert result.ok
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(result.as_dict())
    assert not any("s3cret" in path.read_text() for path in node.folder.rglob("*.*"))


@pytest.mark.usefixtures("engine")
def test_a_state_folder_that_cannot_be_written_is_a_reason(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node.folder / "runs" / (next(node.folder.glob("runs/*.json")).stem + ".answer")).mkdir()
    (reason,) = check(node).reasons
    assert "the state folder cannot be written" in reason


def test_a_node_without_http_is_judged_by_its_processes(node: Node, server: FakeServer) -> None:
    with node.process("vllm serve m") as root:
        node.write_run(root, node={"rank": 1, "count": 2})
        assert check(node).reasons == ("no live worker process",)
        with node.process("VLLM::Worker_TP1"):
            assert check(node).ok
    assert server.requests == []


# Which server


def test_health_is_cheap_to_start() -> None:
    heavy = {"torch", "vllm", "rich", "httpx", "pydantic", "psutil"}
    code = f"import sys, vllm_overlay.health; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


# Status
