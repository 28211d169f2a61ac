"""Several nodes: containers on one network, each a box of its own. A real model on three.

The tests of the three boxes run in the order of the file, on one group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.compose import Node, boxes, docker
from tests.support.node import wait_for

# Nine heads, three of keys and values: three ranks.
THREE = """\
schema: 1
name: three
extends: demo
nodes: {count: 3}
serve: {tensor-parallel-size: 3, max-model-len: 1024, max-num-seqs: 4, shutdown-timeout: 20}
"""
TWO = """\
schema: 1
name: two
extends: demo
nodes: {count: 2}
serve: {pipeline-parallel-size: 2}
"""
STARTED = 600  # seconds for a group of three to serve on two cores


def group(folder: Path, image: str, recipe: str, count: int, **env: str) -> Iterator[list[Node]]:
    """Yield boxes on a network of their own; nothing is left of them."""
    network = f"vllm-overlay-test-{recipe}-{os.getpid()}"
    docker("network", "create", network)
    made = boxes(folder, network, image, count, RECIPE=recipe, **env)
    for box in made:
        (box.checkout / "recipes" / "three.yaml").write_text(THREE)
        (box.checkout / "recipes" / "two.yaml").write_text(TWO)
    try:
        yield made
    finally:
        for box in made:
            box.compose("down", "--volumes", "--timeout", "5", check=False)
        docker("network", "rm", network)


@pytest.fixture(scope="module")
def three(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    yield from group(tmp_path_factory.mktemp("three"), image, "three", 3)


@pytest.fixture
def two(image: str, tmp_path: Path) -> Iterator[list[Node]]:
    yield from group(tmp_path, image, "two", 2, RESTART="no")


def start(box: Node) -> None:
    box.compose("up", "--detach", "--no-build")


def rows(head: Node) -> list[dict[str, Any]]:
    """Return every process of every node, as the head shows them; none before it serves."""
    done = head.exec("vllm-overlay", "status", "--cluster", "--json", check=False)
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"] if done.returncode == 0 else []
    return found


def status(box: Node) -> str:
    return box.inspect("{{.State.Status}} {{.State.ExitCode}}")


def log(box: Node) -> str:
    done = box.compose("logs", "--no-log-prefix", check=False)
    return done.stdout + done.stderr


def says(box: Node, text: str) -> None:
    def looks() -> bool:
        assert status(box).startswith(("running", "restarting", "created")), log(box)[-3000:]
        return text in log(box)

    wait_for(looks, f"{text!r} from {box.env['NODE_RANK']}", STARTED)


def serves(head: Node) -> None:
    wait_for(lambda: head.inspect("{{.State.Health.Status}}") == "healthy", "health", STARTED)


def test_three_nodes_serve_in_any_order_with_the_fixes_in_every_process(
    three: list[Node],
) -> None:
    head, first, last = three
    start(last)
    says(last, "waiting for the head: HEAD_ADDR box-0 is not known")
    start(first)
    start(head)
    serves(head)
    smoke = head.exec("vllm-overlay", "smoke", check=False)
    assert smoke.returncode == 0, smoke.stdout
    found = rows(head)
    assert {row["host"] for row in found} == {"box-0", "box-1", "box-2"}
    assert {row["state"] for row in found} == {"running"}
    assert len({row["plan"] for row in found}) == 1
    roles = {(row["node"], row["role"]) for row in found}
    assert roles >= {(0, "api-server"), (0, "engine-core"), (0, "worker"), (1, "worker"),
                     (1, "headless"), (2, "worker"), (2, "headless")}  # fmt: skip
    for row in found:
        assert set(row["fixes"]) == {"truncate-to-fit", "overlay-route"}
        assert set(row["fixes"].values()) <= {"applied", "waiting"}
        assert row["fixes"]["truncate-to-fit"] == "applied", row
    page = head.exec("python", "-c", PAGE).stdout
    shown = {(row["host"], row["pid"], row["role"]) for row in json.loads(page)["receipts"]}
    assert shown == {(row["host"], row["pid"], row["role"]) for row in rows(head)}
    for box in (first, last):
        assert box.exec("vllm-overlay", "health", check=False).returncode == 0


PAGE = """
import urllib.request as u
asked = u.Request("http://127.0.0.1:8000/overlay", headers={"Accept": "application/json"})
print(u.urlopen(asked).read().decode())
"""


def test_a_killed_worker_ends_the_group_and_it_begins_anew(three: list[Node]) -> None:
    head, first, last = three
    began = [box.inspect("{{.State.StartedAt}}") for box in three]
    kill_worker(last)
    wait_for(lambda: head.exec("vllm-overlay", "health", check=False).returncode != 0, "health", 30)
    for box, old in zip(three, began, strict=True):
        wait_for(lambda b=box, o=old: b.inspect("{{.State.StartedAt}}") != o, "a new start", 60)
    serves(head)
    assert {row["state"] for row in rows(head)} == {"running"}
    assert status(first) == status(last) == "running 0"


def kill_worker(box: Node) -> None:
    """Kill the one worker process of a box, with what the image has."""
    (row,) = [
        row
        for row in json.loads(box.exec("vllm-overlay", "status", "--json").stdout)["processes"]
        if row["role"] == "worker"
    ]
    box.shell(f"kill -9 {row['pid']}")


def test_the_workers_follow_a_head_that_is_stopped(three: list[Node]) -> None:
    head, first, last = three
    head.compose("stop")
    assert status(head) == "exited 0"
    for box in (first, last):
        wait_for(lambda b=box: status(b) == "exited 0", "its end", 60)
    assert "the head was stopped; this node follows" in log(first)


def test_a_flag_on_the_head_only_is_refused(two: list[Node]) -> None:
    head, worker = two
    start(worker)
    head.compose("up", "--detach", "--no-build", VLLM_TRUNCATE_TO_FIT="0")
    for box in two:
        wait_for(lambda b=box: status(b) == "exited 78", "its end", 300)
        line = "differs from the head on box-0"
        assert line in log(box)
        assert "in env.VLLM_TRUNCATE_TO_FIT: 1 on box-1" in log(box)
