"""What the head shows of every node, and what it makes of it."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.node import Node, run_of
from vllm_overlay import health
from vllm_overlay.activate.receipt import process_key, write_atomic
from vllm_overlay.cluster import FRESH, cluster_rows, cluster_table
from vllm_overlay.errors import UsageError

HEAD = {"rank": 0, "count": 3, "head": "a", "port": 29501, "address": "10.0.0.1", "nnodes": True}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def head(node: Node) -> Iterator[int]:
    """The head of three nodes, which has heard of the second."""
    with node.process("VLLM::APIServer_0") as pid:
        node.write_run(pid, node=HEAD)
        tell(node, pid, {"1": [row(1)], "2": [row(2)]})
        yield pid


def row(of: int, **changed: Any) -> dict[str, Any]:
    fixes = {"overlay-route": "applied", "other": "waiting"}
    return {
        "node": of, "host": f"box-{of}", "address": f"10.0.0.{of + 1}", "pid": 7, "role": "worker",
        "rank": None, "plan": "a" * 64, "state": "running", "fixes": fixes, "notes": {},
        **changed,
    }  # fmt: skip


def tell(node: Node, pid: int, nodes: dict[str, Any], age: float = 0) -> None:
    """Write what the head's main process gathers."""
    pid, start = process_key(pid)
    path = node.folder / "cluster" / f"{pid}-{start}.json"
    write_atomic(str(path), {"schema": 1, "at": time.time() - age, "nodes": nodes})


def others(node: Node) -> list[dict[str, Any]]:
    return others_of(cluster_rows(run_of(node)))


def others_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in found["rows"] if item["node"]]


def test_every_nodes_processes_are_shown(node: Node, head: int) -> None:
    found = cluster_rows(run_of(node))
    assert (found["plan"], found["nodes"], found["recipe"]) == (node.digest, 3, "demo")
    assert others(node) == [row(1), row(2)]
    (own,) = [item for item in found["rows"] if item["pid"] == head]
    assert (own["node"], own["host"], own["address"]) == (0, os.uname().nodename, "10.0.0.1")
    assert (own["role"], own["state"], own["fixes"]["other"]) == (
        "api-server",
        "running",
        "applied",
    )
    json.dumps(found)


def test_a_node_that_has_said_nothing_is_missing(node: Node, head: int) -> None:
    tell(node, head, {"1": [row(1)]})
    (missing,) = [item for item in others(node) if item["node"] == 2]
    assert (missing["state"], missing["pid"], missing["host"]) == ("missing", None, None)
    (node.folder / "cluster").joinpath(f"{'-'.join(map(str, process_key(head)))}.json").unlink()
    assert [item["state"] for item in others(node)] == ["missing", "missing"]


def test_old_rows_are_no_news(node: Node, head: int) -> None:
    tell(node, head, {"1": [row(1)], "2": [row(2)]}, age=FRESH + 10)
    assert [item["state"] for item in others(node)] == [f"no news for {FRESH + 10:.0f} s"] * 2


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ([row(1)], None),
        ([row(1, state="starting", fixes={})], None),
        ([row(1, state="without plan", plan=None)],
         "node 1 on box-1, process 7 (worker): without plan"),
        ([row(1, plan="b" * 64)], "node 1 on box-1, process 7: it runs plan bbbbbbbb"),
        ([row(1, fixes={"other": "applied"})],
         "node 1 on box-1, process 7 (worker): overlay-route is absent"),
        ([], "node 1: missing"),
    ],
)  # fmt: skip
def test_the_heads_health_holds_every_node_to_the_plan(
    node: Node, head: int, theirs: list[dict[str, Any]], says: str | None
) -> None:
    tell(node, head, {"1": theirs, "2": [row(2)]})
    check = health.check_nodes(run_of(node))
    assert (check.ok, check.reasons) == (says is None, (says,) if says else ())


def test_health_asks_for_the_nodes_of_a_head(node: Node, head: int) -> None:
    tell(node, head, {})
    result = health.check(run_of(node), proc=node.proc)
    assert "node 1: missing" in result.reasons
    assert "nodes" in {check.name for check in result.checks}


def test_a_rank_that_waits_is_not_healthy(node: Node) -> None:
    with node.process("vllm serve m") as pid:
        node.write_run(pid, node={**HEAD, "rank": 1})
        with node.process("VLLM::Worker_TP1", group={"waiting": "waiting for the head"}):
            (reason,) = health.check_processes(run_of(node), node.proc, settle=0).reasons
        assert reason.endswith("waiting for the head")
        with node.process("VLLM::Worker_TP1", group={"start": "x", "rank": 1}):
            assert health.check_processes(run_of(node), node.proc).ok


def test_only_a_head_of_several_nodes_can_be_asked(node: Node) -> None:
    with pytest.raises(UsageError, match="no server of several nodes runs on this machine"):
        cluster_rows(None)
    with node.process("vllm serve m") as pid:
        node.write_run(pid)
        with pytest.raises(UsageError, match="no server of several nodes"):
            cluster_rows(run_of(node))
        node.write_run(pid, node={**HEAD, "rank": 1})
        with pytest.raises(UsageError, match="only the head knows of every node") as caught:
            cluster_rows(run_of(node))
        assert "found node 1" in str(caught.value) and "ask on a" in str(caught.value)


def test_the_head_is_the_server_where_nodes_share_a_machine(node: Node, head: int) -> None:
    with node.process("vllm serve m --headless") as other:
        node.write_run(other, node={**HEAD, "rank": 1})
        assert run_of(node).pid == head


def test_rays_actors_elsewhere_are_shown_as_they_joined(node: Node) -> None:
    from rich.console import Console

    actor = {"rank": 1, "node": 1, "host": "box-1 (10.0.0.2)", "address": "10.0.0.2", "pid": 7}
    roster = [{**actor, "fixes": {"other": "applied"}}]
    notes = {"other": {"kernel": "cuda sm_90"}}
    fixes = [{"name": name, "modules": {"vllm.a": "applied"}, "notes": said}
             for name, said in notes.items()]  # fmt: skip
    group = {"start": "x", "roster": roster}
    with node.process("VLLM::APIServer_0", group=group, fixes=fixes) as pid:
        node.write_run(pid, node={**HEAD, "nnodes": False})
        found = cluster_rows(run_of(node))
    (own,) = [item for item in found["rows"] if item["pid"] == pid]
    assert own["notes"] == notes
    told_of = {"fixes": {"other": "applied"}, "notes": {}, "rank": "1", "plan": node.digest}
    assert others_of(found) == [row(1, **told_of)]
    Console(file=io.StringIO()).print(cluster_table(found))


def test_the_table_names_hosts_and_states(node: Node, head: int) -> None:
    from rich.console import Console

    tell(node, head, {"1": [row(1)]})
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(cluster_table(cluster_rows(run_of(node))))
    text = console.export_text()
    assert "demo on 3 nodes" in text and "box-1 10.0.0.2" in text and "missing" in text
