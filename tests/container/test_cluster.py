"""Several nodes: containers on one network, each a box of its own. A real model on three.

The tests of the three boxes run in the order of the file, on one group.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import node
from tests.support.compose import Node, boxes, docker
from vllm_overlay.fix import load_fix
from vllm_overlay.resolve import fix_digest

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
# A look runs docker's commands: one after the other they would take a core from what is awaited.
wait_for = partial(node.wait_for, every=1.0)


def group(
    folder: Path, image: str, facts: Path, recipe: str, count: int, **env: str
) -> Iterator[list[Node]]:
    """Yield boxes on a network of their own; nothing is left of them."""
    network = f"vllm-overlay-test-{recipe}-{os.getpid()}"
    docker("network", "create", network)
    made = boxes(folder, network, image, count, facts, RECIPE=recipe, **env)
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
def three(
    image: str, facts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Node]]:
    yield from group(tmp_path_factory.mktemp("three"), image, facts, "three", 3)


@pytest.fixture(scope="module")
def two(image: str, facts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Two boxes for one refusal after the other. No group forms, so no model is loaded."""
    yield from group(tmp_path_factory.mktemp("two"), image, facts, "two", 2, RESTART="no")


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


@pytest.fixture
def refusal(two: list[Node], request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    """The two boxes with a recipe for this test alone; their containers are gone at its end."""
    name = request.node.name
    head, worker = (replace(box, env={**box.env, "RECIPE": name}) for box in two)
    for box in two:
        (box.checkout / "recipes" / f"{name}.yaml").write_text(TWO.replace("two", name))
    yield [head, worker]
    for box in two:
        box.compose("down", "--remove-orphans", "--timeout", "5")


def refused(head: Node, worker: Node, key: str, there: str, here: str) -> None:
    """Both boxes end with 78, and both say where the worker differs, and how."""
    for box in (head, worker):
        wait_for(lambda b=box: status(b) == "exited 78", "its end", STARTED)
    at, on = (f"on box-{rank} ({address(box)})" for rank, box in enumerate((head, worker)))
    line = f"rank 1 {on} differs from the head {at} in {key}: {there} {on}, {here} {at}"
    for box in (head, worker):
        assert line in log(box)


def address(box: Node) -> str:
    """Return what the box itself has said."""
    return log(box).partition("VLLM_HOST_IP=")[2].split()[0]


def test_a_flag_on_the_head_only_is_refused(refusal: list[Node]) -> None:
    head, worker = refusal
    start(worker)
    head.compose("up", "--detach", "--no-build", VLLM_TRUNCATE_TO_FIT="0")
    refused(head, worker, "env.VLLM_TRUNCATE_TO_FIT", "1", "0")


def test_a_fix_that_was_edited_on_one_box_is_refused(refusal: list[Node]) -> None:
    head, worker = refusal
    folders = [box.checkout / "fixes" / "truncate-to-fit" for box in refusal]
    edit = folders[1] / "chat_completion.diff"
    lines = edit.read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("+"))
    lines[last] += "  # here only"
    edit.write_text("\n".join(lines) + "\n")
    here, there = (fix_digest(load_fix(folder)) for folder in folders)
    try:
        start(worker)
        start(head)
        refused(head, worker, "fixes.truncate-to-fit.digest", there, here)
    finally:
        shutil.copy(folders[0] / edit.name, edit)


def test_a_recipe_of_one_name_with_other_content_is_refused(refusal: list[Node]) -> None:
    head, worker = refusal
    recipe = worker.checkout / "recipes" / f"{worker.env['RECIPE']}.yaml"
    recipe.write_text(recipe.read_text().replace("{pipeline", "{max-num-seqs: 3, pipeline"))
    start(worker)
    start(head)
    refused(head, worker, "serve.max-num-seqs", "3", "16")


OLDER = """\
FROM {image}
USER root
RUN echo >>"$(python -c 'import vllm_overlay as v; print(v.__file__)')"
USER 10001:10001
"""


def test_another_build_of_the_image_is_refused(refusal: list[Node], image: str) -> None:
    head, worker = refusal
    older = f"{image}-older"
    docker("build", "--tag", older, "-", stdin=OLDER.format(image=image))
    worker = replace(worker, env={**worker.env, "IMAGE": older})
    try:
        start(worker)
        start(head)
        builds = [box.exec("python", "-c", BUILD).stdout.strip() for box in (worker, head)]
        refused(head, worker, "nodes.build", *builds)
    finally:
        worker.compose("down", "--timeout", "10", check=False)
        docker("rmi", older)


BUILD = "from vllm_overlay.buildid import build_id; print(build_id())"
VLLM = """\
exec vllm serve /models/smollm2-135m-instruct --headless --enforce-eager \
  --pipeline-parallel-size 2 --nnodes 2 --node-rank 1 --master-addr box-0
"""


def test_a_worker_without_the_overlay_is_refused(refusal: list[Node]) -> None:
    """Nothing in it could end it with 78: it ends as vLLM does that has lost the head."""
    head, worker = refusal
    start(head)
    env = [word for name in PLAIN for word in ("--env", name)]
    run = ("run", "--detach", "--use-aliases", "--entrypoint", "sh", *env, "serve", "-c", VLLM)
    bare = worker.compose(*run).stdout.strip()
    wait_for(lambda: status(head) == "exited 78", "its end", STARTED)
    where = docker("inspect", "--format", ADDRESS, bare)
    named = f"rank 1 on {where} differs from the head on box-0 ({address(head)}) in the overlay: "
    assert f"{named}absent: it was started without a plan on {where}, active on box-0" in log(head)
    assert docker("wait", bare) not in ("0", "78")


PLAIN = ("VLLM_TARGET_DEVICE=cpu", "VLLM_CPU_KVCACHE_SPACE=1", "HF_HUB_OFFLINE=1")
ADDRESS = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
