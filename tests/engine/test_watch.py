"""The nodes of a group live and die together: real processes, a real store, no engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.node import wait_for
from tests.support.ranks import Rank, Ranks, ranks
from vllm_overlay.cluster import cluster_rows
from vllm_overlay.runs import Run, find_run


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Ranks]:
    with ranks(tmp_path) as group:
        yield group


def started(group: Ranks, silence: float = 60) -> tuple[Rank, Rank]:
    """Return both nodes, once each has heard of the other."""
    head, worker = group.serve(0, silence), group.serve(1, silence)
    wait_for(lambda: states(group)[1] == "running", "the other node's rows")
    return head, worker


def head_run(group: Ranks) -> Run | None:
    return find_run(group.folder / "home", 1000)


def states(group: Ranks) -> list[str]:
    """Return the state of each node's main process, as the head shows it."""
    run = head_run(group)
    rows = cluster_rows(run)["rows"] if run else []
    mains = {run.process.pid for run in group.started}
    found = {r["node"]: r["state"] for r in rows if r["pid"] in mains or r["pid"] is None}
    return [found.get(node, "none") for node in range(group.world)]


def child(rank: Rank) -> psutil.Process:
    found: psutil.Process
    (found,) = psutil.Process(rank.process.pid).children()
    return found


def test_the_head_has_the_rows_of_every_node(two: Ranks) -> None:
    _, worker = started(two)
    run = head_run(two)
    rows = {(row["node"], row["pid"]): row for row in cluster_rows(run)["rows"]}
    row = rows[1, worker.process.pid]
    assert row["address"] == "10.0.0.2"
    assert row["host"] == os.uname().nodename
    assert run is not None and row["plan"] == run.digest
    assert row["fixes"] == {"a-fix": "waiting"}


def test_before_the_group_is_whole_the_rest_is_missing(two: Ranks) -> None:
    two.serve(0).says("waiting for rank 1 (node 1)")
    assert states(two)[1] == "missing"


def test_a_dead_worker_ends_the_whole_group(two: Ranks) -> None:
    head, worker = started(two)
    child(worker).send_signal(signal.SIGKILL)
    assert (head.ends(), worker.ends()) == (1, 1)
    assert "the group has ended (node 1 has died)" in head.said


def test_a_dead_node_ends_the_head(two: Ranks) -> None:
    """Nobody is left there to say so."""
    head, worker = started(two, silence=3)
    os.killpg(worker.process.pid, signal.SIGKILL)
    assert head.ends() == 1
    assert "node 1 has been silent for 3 s" in head.said
    (failure,) = (two.folder / "home").glob("plans/*/failures/*.json")
    assert "node 1 has been silent" in failure.read_text()


def test_a_hanging_node_ends_the_head(two: Ranks) -> None:
    head, worker = started(two, silence=3)
    os.kill(worker.process.pid, signal.SIGSTOP)
    assert head.ends() == 1


def test_a_dead_head_ends_the_workers(two: Ranks) -> None:
    head, worker = started(two)
    os.killpg(head.process.pid, signal.SIGKILL)
    assert worker.ends() == 1
    assert "the group has ended" in worker.said


def test_a_head_that_dies_as_the_group_forms_ends_the_workers(two: Ranks) -> None:
    """Before the node's main process has reached the store."""
    head, worker = two.serve(0), two.serve(1)
    worker.says("added up 2")
    os.killpg(head.process.pid, signal.SIGKILL)
    assert worker.ends() == 1


def test_workers_follow_a_head_that_is_stopped(two: Ranks) -> None:
    head, worker = started(two)
    os.kill(head.process.pid, signal.SIGTERM)
    assert (head.ends(), worker.ends()) == (0, 0)
    assert "the head was stopped; this node follows" in worker.said


def test_a_worker_that_is_stopped_ends_the_group(two: Ranks) -> None:
    """It is left with 0: only the others must start again."""
    head, worker = started(two)
    os.kill(worker.process.pid, signal.SIGTERM)
    assert (head.ends(), worker.ends()) == (1, 0)
    assert "node 1 has been stopped" in head.said


def left_over(before: set[Path]) -> set[Path]:
    """Return new files of shared memory that no live process uses, whoever's it is."""
    new = {*Path("/dev/shm").iterdir()} - before
    for maps in Path("/proc").glob("[0-9]*/maps") if new else ():
        with suppress(OSError):
            text = maps.read_text()
            new -= {path for path in new if str(path) in text}
    return {path for path in new if path.exists()}


def test_up_and_down_leaves_nothing(two: Ranks) -> None:
    before = {*Path("/dev/shm").iterdir()}
    for _ in range(10):
        head, worker = started(two)
        children = [child(head), child(worker)]
        os.kill(head.process.pid, signal.SIGTERM)
        assert (head.ends(), worker.ends()) == (0, 0)
        psutil.wait_procs(children, timeout=30)
        assert not any(item.is_running() for item in children)
        assert left_over(before) == set()
