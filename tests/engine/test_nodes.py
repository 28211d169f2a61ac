"""Recipes for several nodes against the installed vLLM: one plan for all, whoever asks."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.node import wait_for
from tests.support.ranks import own_address, ranks
from tests.support.serving import COMMAND, cli, environment, free_port, share_facts
from vllm_overlay.activate.receipt import write_atomic
from vllm_overlay.launch import RETRY_SECONDS

RECIPE = """\
schema: 1
name: two
extends: demo
nodes: {count: 2}
serve: {pipeline-parallel-size: 2}
env: {GLOO_SOCKET_IFNAME: eth7}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state folder: what vLLM's parser knows is asked once."""
    folder = tmp_path_factory.mktemp("home")
    share_facts(folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "two.yaml"
    file.write_text(RECIPE)
    return file


def test_every_node_has_the_same_plan(home: Path, recipe: Path) -> None:
    """What may differ between nodes is no part of it."""
    plans = []
    for env in (
        {},
        {"NODE_RANK": "0", "HEAD_ADDR": "a"},
        {
            "NODE_RANK": "1",
            "HEAD_ADDR": "b",
            "GLOO_SOCKET_IFNAME": "ib0",
            "VLLM_HOST_IP": "1.2.3.4",
        },
    ):
        done = cli("plan", str(recipe), "--json", home=home, env=env)
        assert done.returncode == 0, done.stderr
        plans.append(json.loads(done.stdout))
    assert plans[0] == plans[1] == plans[2]
    assert plans[0]["nodes"]["count"] == 2 and len(plans[0]["nodes"]["build"]) == 64
    assert plans[0]["env"]["GLOO_SOCKET_IFNAME"] == "eth7"
    other = cli("plan", str(recipe), "--json", home=home, env={"GLOO_TIMEOUT": "1"})
    assert json.loads(other.stdout) == plans[0], "only `serve` and its ranks look at it"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--", "-n", "2"), "command line: flag 'nnodes' is not taken here; give the recipe nodes"),
        (("--", "--headless"), "command line: flag 'headless' is not taken here"),
        (("--", "-pp", "3"), "two.yaml:4:9: 3 ranks cannot be spread evenly over 2 nodes"),
    ],
)
def test_flags_that_contradict_the_nodes_are_refused(
    home: Path, recipe: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = cli("plan", str(recipe), *arguments, home=home)
    assert done.returncode == 78
    assert says in done.stderr


def test_serve_asks_for_the_nodes_place(home: Path, recipe: Path) -> None:
    done = cli("serve", str(recipe), home=home)
    assert done.returncode == 78
    assert done.stderr.startswith(
        "vllm-overlay: environment: NODE_RANK is not set; expected 0 to 1"
    )
    assert not list(home.glob("plans/*")), "a refused launch left a plan"


def test_a_refused_recipe_does_not_wait_for_the_head(home: Path, recipe: Path) -> None:
    env = {"NODE_RANK": "0", "HEAD_ADDR": "nowhere.invalid"}
    done = cli("serve", str(recipe), "--", "-pp", "3", home=home, env=env)
    assert done.returncode == 78
    assert "3 ranks cannot be spread evenly" in done.stderr
    assert "waiting" not in done.stderr


def test_a_node_that_is_refused_before_its_start_ends_the_head_too(
    home: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(RECIPE + 'vllm: "0.31.0"\n')
    _, address = own_address()
    with ranks(tmp_path) as two:
        head = two.start(0)
        head.says("waiting for rank 1")
        env = {"NODE_RANK": "1", "HEAD_ADDR": f"{address}:{two.port}"}
        done = cli("serve", str(other), home=home, env=env)
        assert (done.returncode, head.ends()) == (78, 78)
    assert "recipe two is for another vLLM; found vLLM 0.32.0" in done.stderr
    assert f"telling the head at {address}:{two.port}" in done.stderr
    assert "in vllm.version: 0.32.0 on" in head.said


def test_a_node_that_was_refused_a_moment_ago_waits_before_it_starts(
    home: Path, recipe: Path, tmp_path: Path
) -> None:
    """As Docker starts it again; until then there is no vLLM."""
    arguments = ("--", "--port", str(free_port()))
    plan = json.loads(cli("plan", str(recipe), "--json", *arguments, home=home).stdout)
    folder = home / "plans" / plan["digest"]
    until = time.time() + 40  # longer than a start takes to get there
    failure = {"line": "the other box", "at": until - RETRY_SECONDS}
    write_atomic(str(folder / "failures" / "1-1.json"), failure)
    env = {"NODE_RANK": "0", "HEAD_ADDR": own_address()[1]}
    log = tmp_path / "log"
    with log.open("wb") as file:
        serve = subprocess.Popen(
            [COMMAND, "serve", str(recipe), *arguments],
            env=environment(home, env),
            stdout=file,
            stderr=file,
        )
    try:
        wait_for(lambda: serve.poll() is not None or any(folder.glob("runs/*")), "its start", 120)
        assert serve.poll() is None, log.read_text()
        assert time.time() >= until
        assert "this node was refused (the other box); it tries again in " in log.read_text()
    finally:
        serve.kill()
        serve.wait()
