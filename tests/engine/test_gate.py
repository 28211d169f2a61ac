"""Who may join a group of several nodes: real processes, a real store, no engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.kdalib import lay
from tests.support.node import wait_for
from tests.support.ranks import FIX, Ranks, ranks
from vllm_overlay.activate.planfile import sha256

HOST = os.uname().nodename
FIX_KEY = "fixes.a-fix.digest"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Ranks]:
    with ranks(tmp_path) as group:
        yield group


def receipts(group: Ranks) -> list[dict[str, Any]]:
    return [json.loads(p.read_bytes()) for p in group.folder.glob("home/plans/*/receipts/*.json")]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_equal_ranks_join_in_any_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    with ranks(tmp_path, 3, nodes={"count": 3}) as three:
        started = {}
        for rank in order:
            started[rank] = three.start(rank)
            if rank != order[-1]:
                started[rank].says("waiting for")
        assert [rank.ends() for rank in started.values()] == [0, 0, 0]
        assert all("added up 3" in rank.said for rank in started.values())
        groups = [receipt["group"] for receipt in receipts(three)]
    assert {group["start"] for group in groups} == {groups[0]["start"]}
    assert sorted(group["rank"] for group in groups) == [0, 1, 2]


def test_the_head_names_who_is_missing(tmp_path: Path) -> None:
    with ranks(tmp_path, 4) as four:
        head = four.start(0)
        head.says("waiting for rank 1 (node 0), 2 (node 1), 3 (node 1) of 4; here: rank 0 on")
        four.start(2)
        head.says("waiting for rank 1 (node 0), 3 (node 1) of 4")


@pytest.mark.parametrize(
    ("environ", "plan", "key", "here", "there"),
    [
        ({"VLLM_B": "1"}, {}, "environment.VLLM_B", "unset", "1"),
        ({}, {"fixes": (replace(FIX, digest="2" * 64),)}, FIX_KEY, "1" * 64, "2" * 64),
    ],
)
def test_a_difference_ends_the_rank_and_the_head(
    two: Ranks, environ: dict[str, str], plan: dict[str, Any], key: str, here: str, there: str
) -> None:
    head, other = two.start(0), two.start(1, environ=environ, **plan)
    assert (head.ends(), other.ends()) == (78, 78)
    named = f"rank 1 on {HOST} differs from the head on {HOST} in {key}: "
    line = f"{named}{there} on {HOST}, {here} on {HOST}"
    assert line in head.said and line in other.said
    assert "added up" not in head.said + other.said


@pytest.mark.parametrize(
    ("here", "there"),
    [(b"a", b"b"), (b"a", None), (None, b"b")],
)
def test_ranks_that_would_run_different_kda_libraries_do_not_start(
    two: Ranks, here: bytes | None, there: bytes | None
) -> None:
    def libraries(name: str, code: bytes | None) -> tuple[dict[str, str], str]:
        folder = two.folder / name
        folder.mkdir()
        if code is not None:
            lay(folder, code)
        return {"LIBRARY": str(folder)}, sha256(code) if code else "none"

    (mine, head_runs), (theirs, rank_runs) = libraries("0", here), libraries("1", there)
    head, other = two.start(0, environ=mine), two.start(1, environ=theirs)
    assert (head.ends(), other.ends()) == (78, 78)
    line = f"in kda.library: {rank_runs} on {HOST}, {head_runs} on {HOST}"
    assert line in head.said and line in other.said
    assert "added up" not in head.said + other.said


def test_ranks_with_one_kda_library_join_wherever_it_lies(two: Ranks) -> None:
    folders = [lay(two.folder / name, b"a") for name in ("0", "1")]
    started = [two.start(rank, environ={"LIBRARY": str(folders[rank])}) for rank in (0, 1)]
    assert [rank.ends() for rank in started] == [0, 0]


def test_what_may_differ_does(two: Ranks) -> None:
    names = ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
    env = {**dict.fromkeys(names, "lo"), "VLLM_HOST_IP": "127.0.0.1", "VLLM_API_KEY": "s3cret"}
    head, other = two.start(0), two.start(1, environ={**env, "OTHER": "1"})
    assert (head.ends(), other.ends()) == (0, 0)


def test_the_ranks_that_are_equal_end_too_and_are_told_why(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, nodes={"count": 3}) as three:
        equal = three.start(1)
        head = three.start(0)
        equal.says("waiting for the other ranks")
        other = three.start(2, environ={"VLLM_B": "1"})
        assert [rank.ends() for rank in (head, equal, other)] == [78, 78, 78]
        assert "the head refuses the group: rank 2 on" in equal.said


def test_a_rank_without_the_overlay_is_refused_at_once(two: Ranks) -> None:
    head, other = two.start(0), two.start(1, overlay=False)
    assert head.ends() == 78
    assert "rank 1 on 127.0.0.1 differs from the head" in head.said
    assert "in the overlay: absent: it was started without a plan on 127.0.0.1, active" in head.said
    assert other.ends() != 0
    assert "added up" not in other.said


def test_a_head_without_the_overlay_is_refused(two: Ranks) -> None:
    two.start(0, overlay=False)
    other = two.start(1)
    assert other.ends() == 78
    assert "the head runs without the overlay" in other.said


@pytest.mark.parametrize(
    ("facts", "line", "says"),
    [
        ({"vllm.version": "9.8.0"}, "x", "in vllm.version: 9.8.0 on"),
        (
            {"vllm.version": "9.9.0"},
            "the plan cannot be read",
            "in its overlay: refused (the plan cannot be read) on",
        ),
    ],
)
def test_a_node_that_cannot_come_lets_the_head_know(
    two: Ranks, facts: dict[str, str], line: str, says: str
) -> None:
    word = {"host": "127.0.0.1", "port": two.port, "node": 1, "line": line, "facts": facts}
    command = [sys.executable, "-m", "vllm_overlay.tell"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as teller:
        assert teller.stdin is not None
        teller.stdin.write(json.dumps({**word, "patience": 60}).encode())
        teller.stdin.close()
        head = two.start(0)  # comes later than the word
        assert head.ends() == 78
        assert teller.wait() == 0
    assert f"rank 1 on {HOST} differs from the head on {HOST} {says}" in head.said


def test_a_plan_that_is_missing_on_a_node_ends_it_and_the_head(two: Ranks) -> None:
    head = two.start(0)
    head.says("waiting for rank 1")
    place = {"NODE_RANK": "1", "HEAD_ADDR": f"127.0.0.1:{two.port}"}
    env = {**os.environ, **place, "VLLM_OVERLAY_PLAN": "/nowhere/plan.json"}
    assert subprocess.run([sys.executable, "-c", ""], env=env, check=False).returncode == 78
    assert head.ends() == 78
    assert f"rank 1 on {HOST} differs from the head on {HOST} in its overlay: refused" in head.said
    assert "the plan /nowhere/plan.json cannot be read" in head.said


def test_an_actor_of_rays_without_its_plan_ends_alone(two: Ranks) -> None:
    """Ray tells the driver. What listens at the head's address is another group's, if anything."""
    head = two.start(0)
    head.says("waiting for rank 1")
    place = {"NODE_RANK": "1", "HEAD_ADDR": f"127.0.0.1:{two.port}", "RAY_RAYLET_PID": "1"}
    env = {**os.environ, **place, "VLLM_OVERLAY_PLAN": "/nowhere/plan.json"}
    assert subprocess.run([sys.executable, "-c", ""], env=env, check=False).returncode == 78
    other = two.start(1)
    assert (head.ends(), other.ends()) == (0, 0)


@pytest.mark.parametrize("astray", [0, 1])
def test_a_process_above_a_rank_runs_the_plan_too(two: Ranks, astray: int) -> None:
    """On the head, the API server and EngineCore."""
    nodes = [two.serve(rank, overlay=rank != astray) for rank in range(2)]
    for node in nodes:
        node.says(f"rank 1 on {HOST} (10.0.0.2) differs from the head on {HOST} (10.0.0.1) in")
        bad = f"without the plan on {HOST}: engine-core {nodes[astray].process.pid}"
        node.says(f"{bad} on {HOST} (10.0.0.{astray + 1})")
        assert "added up" not in node.said
    assert nodes[1 - astray].ends() == 78


def test_two_nodes_of_one_rank_are_refused(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, nodes={"count": 3}) as three:
        head, first = three.start(0), three.start(1)
        first.says("waiting for the other ranks")
        second = three.start(1)
        assert second.ends() == 78
        assert "rank 1 is taken" in second.said and "set another NODE_RANK" in second.said
        three.start(2)
        assert (head.ends(), first.ends()) == (0, 0)


def test_a_rank_that_died_while_it_waited_may_come_again(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, nodes={"count": 3}) as three:
        head, first = three.start(0), three.start(1)
        head.says("waiting for rank 2 (node 2) of 3")
        first.process.kill()
        first.process.join()
        head.says("waiting for rank 1 (node 1), 2 (node 2) of 3")
        again, last = three.start(1), three.start(2)
        assert [rank.ends() for rank in (head, again, last)] == [0, 0, 0]


def test_no_rank_joins_a_dying_group(two: Ranks) -> None:
    """A restarted worker meets the old head: it waits for the new one, whatever that one runs."""
    head, first = two.start(0, environ={"STAY": "1"}), two.start(1, environ={"STAY": "1"})
    first.says("added up 2")
    head.says("added up 2")
    first.process.kill()
    again = two.start(1, environ={"VLLM_NEW": "1"})
    again.says("its group is complete without this process")
    assert "added up" not in again.said
    head.process.kill()
    head.process.join()
    new = two.start(0, environ={"VLLM_NEW": "1"})
    assert (new.ends(), again.ends()) == (0, 0)
    assert "added up 2" in again.said
    starts = {receipt["group"]["start"] for receipt in receipts(two)}
    assert len(starts) == 2


def test_a_worker_whose_parent_is_gone_does_not_wait_on(two: Ranks) -> None:
    waiting = two.start(1)
    waiting.says("waiting for the head")
    parent = int(
        Path(f"/proc/{waiting.process.pid}/stat").read_text().rpartition(")")[2].split()[1]
    )
    assert parent != os.getpid()
    os.kill(parent, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{waiting.process.pid}").exists() or gone(waiting), "its end")


def gone(rank: Any) -> bool:
    state = Path(f"/proc/{rank.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "Z"
