"""Which server of a node a command means, and what `status` shows of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.node import Node, run_of
from vllm_overlay.activate.receipt import process_key
from vllm_overlay.errors import ConfigError, UsageError
from vllm_overlay.runs import find_run
from vllm_overlay.status import status_rows, status_table


def test_several_servers_need_a_choice(node: Node, engine: int) -> None:
    node.port += 1
    node.write_run(engine)
    with pytest.raises(UsageError, match="several servers run on this node"):
        find_run(node.home)
    run = find_run(node.home, node.port)
    assert run is not None
    assert run.pid == engine
    assert find_run(node.home, 9) is None


@pytest.mark.usefixtures("engine")
def test_records_of_dead_servers_and_of_other_nodes_do_not_count(node: Node) -> None:
    path = next(node.folder.glob("runs/*.json"))
    path.with_name(f"{os.getpid()}-1.json").write_text(path.read_text())
    (node.folder / "runs/999999999-5.json").write_text("{")
    assert run_of(node).start != 1
    pid = run_of(node).pid
    node.write_run(pid, host="another-node")
    assert find_run(node.home) is None


@pytest.mark.usefixtures("engine")
def test_a_torn_record_of_a_live_server_is_refused_by_name(node: Node) -> None:
    path = next(node.folder.glob("runs/*.json"))
    path.write_text("{")
    with pytest.raises(ConfigError, match="record of a running server") as error:
        find_run(node.home)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("host", "serve", "url"),
    [
        (None, {}, "http://127.0.0.1:8"),
        ("0.0.0.0", {}, "http://127.0.0.1:8"),
        ("::", {}, "http://[::1]:8"),
        ("fe80::1", {}, "http://[fe80::1]:8"),
        ("node7", {"ssl-certfile": "/x"}, "https://node7:8"),
    ],
)
def test_the_address_of_a_server(
    tmp_path: Path, host: str | None, serve: dict[str, Any], url: str
) -> None:
    node = Node(tmp_path, port=8, serve=serve)
    node.write_run(os.getpid(), bind_host=host)
    assert run_of(node).url == url


def test_status_shows_each_process_and_its_fixes(node: Node, engine: int) -> None:
    fixes = [{"name": "other", "modules": {"vllm.c": "waiting"}}]
    node.write_failure(8, process_key(engine)[1], "said why")
    with (
        node.process("VLLM::Worker_TP1", rank="1", fixes=fixes) as second,
        node.process("VLLM::Worker_TP2", receipt=False) as third,
    ):
        rows = status_rows(node.home, node.proc)
        by_pid = {row["pid"]: row for row in rows["processes"]}
        assert by_pid[engine]["fixes"] == {"overlay-route": "applied", "other": "applied"}
        assert (by_pid[engine]["role"], by_pid[engine]["state"]) == ("engine-core", "running")
        assert (by_pid[second]["rank"], by_pid[second]["fixes"]) == ("1", {"other": "waiting"})
        assert (by_pid[third]["state"], by_pid[third]["fixes"]) == ("without receipt", {})
    (server,) = rows["servers"]
    assert server["plan"] == node.digest
    assert server["fixes"] == ["overlay-route", "other"]
    assert server["failures"] == [{"pid": 8, "line": "said why"}]
    text = rendered(rows)
    assert "pid 8 failed: said why" in text
    for word in ("waiting", "applied", "engine-core", "overlay-route"):
        assert word in text
    assert re.search(rf"{second} +worker 1 +aaaaaaaa +running +- +other\b", text)


def test_status_of_an_idle_node_says_so(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    rows = status_rows(tmp_path, tmp_path / "proc")
    assert rows == {"servers": [], "processes": []}
    assert "no server" in rendered(rows)


def rendered(rows: dict[str, Any]) -> str:

    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: PTH123,SIM115
    console.print(status_table(rows))
    return console.export_text()
