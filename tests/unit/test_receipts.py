from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.node import Node, program, wait_for
from vllm_overlay.receipts import Receipt, read, read_failures

WRITER = """
import os, sys
from vllm_overlay.activate import receipt
def stop(*_):
    print("ready", flush=True)
    import time; time.sleep(600)
os.replace = stop
receipt.write_atomic(sys.argv[1], {"schema": 1})
"""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_plan_without_receipts_has_none(node: Node) -> None:
    assert read(node.folder) == []
    assert read_failures(node.folder) == []


def test_a_receipt_is_read(node: Node) -> None:
    node.write_receipt(os.getpid(), role="worker", rank=3)
    (receipt,) = read(node.folder)
    assert (receipt.pid, receipt.role, receipt.rank) == (os.getpid(), "worker", "3")
    assert receipt.plan == node.digest
    assert receipt.fixes["other"] == {"vllm.c": "applied"}
    assert receipt.problem is None


def test_a_writer_killed_before_it_renames_leaves_the_old_receipt(node: Node) -> None:
    path = node.write_receipt(os.getpid())
    root = Path(__file__).parents[2]
    with program(sys.executable, "-c", WRITER, path, env={"PYTHONPATH": str(root)}) as writer:
        assert len(list(path.parent.iterdir())) == 2
        os.kill(writer.pid, signal.SIGKILL)
        wait_for(lambda: writer.poll() is not None, "the writer is dead")
    assert [receipt.problem for receipt in read(node.folder)] == [None]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema": 2}',
        "\ufffd",
        json.dumps({"schema": 1, "pid": 7, "start": 8}),
    ],
)
def test_a_corrupt_receipt_is_a_problem_of_the_process_that_its_name_tells(
    node: Node, text: str
) -> None:
    (node.folder / "receipts").mkdir(parents=True)
    (node.folder / "receipts/7-8.json").write_text(text)
    (receipt,) = read(node.folder)
    assert (receipt.pid, receipt.start) == (7, 8)
    assert receipt.problem
    assert "7-8.json cannot be read" in receipt.problem


def test_a_receipt_under_another_process_s_name_is_a_problem(node: Node) -> None:
    path = node.write_receipt(os.getpid())
    path.rename(path.with_name("7-8.json"))
    (receipt,) = read(node.folder)
    assert receipt.problem
    assert "is not its own" in receipt.problem


@pytest.mark.parametrize(
    ("modules", "state"),
    [
        ({"a": "applied", "b": "applied"}, "applied"),
        ({"a": "applied", "b": "waiting"}, "applied"),
        ({"a": "waiting"}, "waiting"),
        ({"a": "applied", "b": "torn"}, "torn"),
        ({}, "waiting"),
    ],
)
def test_the_state_of_a_fix_is_that_of_its_modules(modules: dict[str, Any], state: str) -> None:
    receipt = Receipt(1, 2, "plan", fixes={"fix": modules})
    assert receipt.state("fix") == state
    assert receipt.state("nothing") == "absent"


def test_a_failure_of_another_host_is_not_this_host_s(node: Node) -> None:
    node.write_failure(5, 20, "said why", host="another-node")
    node.write_failure(6, 20, "here", host=os.uname().nodename)
    assert [failure.line for failure in read_failures(node.folder)] == ["here"]


def test_a_failure_is_read_even_if_it_is_corrupt(node: Node) -> None:
    node.write_failure(5, 20, "said why")
    (node.folder / "failures/6-10.json").write_text("{")
    corrupt, good = read_failures(node.folder)
    assert (good.pid, good.line) == (5, "said why")
    assert "6-10.json cannot be read" in corrupt.line
