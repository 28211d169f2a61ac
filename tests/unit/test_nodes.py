"""Which node a machine is: what a recipe says, what the environment says, what follows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import own_address
from tests.support.recipes import HEAD, load, refusals, write
from vllm_overlay import buildid, nodes
from vllm_overlay.errors import ConfigError
from vllm_overlay.launch import child_environment
from vllm_overlay.nodes import Seat, check_sizes, find_seat, seen_by, seen_here
from vllm_overlay.plan import Plan
from vllm_overlay.recipe import Nodes, Requires
from vllm_overlay.yamlio import Place


def plan_of(count: int = 2, **serve: Any) -> Plan:
    return Plan(
        cache_key="0123456789abcdef",
        recipe={"name": "test", "file": "test.yaml", "variant": None},
        folders={},
        vllm={},
        model="m",
        served_model="m",
        serve=serve,
        env={"NCCL_SOCKET_IFNAME": "of-the-recipe", "A": "b"},
        fixes=(),
        overrides=(),
        requires={},
        smoke={},
        modules={},
        nodes={"count": count} if count > 1 else {},
    )


def refusal(environ: dict[str, str], count: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        find_seat(plan_of(count), environ)
    assert caught.value.exit_code == 78
    return str(caught.value)


# The recipe


def test_a_recipe_says_how_many_nodes_and_what_each_must_have(tmp_path: Path) -> None:
    write(
        tmp_path,
        "r",
        HEAD
        + "nodes: {count: 4, per-node: {gpus: 1, shm: 8GiB}}\n"
        + "variants: {two: {nodes: {count: 2, per-node: {gpus: 2}}}}\n",
    )
    assert load(tmp_path).nodes == Nodes(4, Requires(gpus=1, shm="8GiB"))
    assert load(tmp_path, variant="two").nodes == Nodes(2, Requires(gpus=2, shm="8GiB"))
    write(tmp_path, "r", HEAD)
    assert load(tmp_path).nodes == Nodes(1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes: {count: 0}", "5:16: wrong value of 'nodes.count'; found the number 0"),
        ("nodes: {count: two}", "5:16: wrong type of 'nodes.count'; found the text 'two'"),
        ("nodes: {cuont: 2}", "5:9: unknown key 'cuont' in 'nodes'; did you mean 'count'?"),
        ("nodes: {per-node: {gpu: 2}}", "did you mean 'gpus'?"),
        ("nodes: 2", "5:8: wrong type of 'nodes'"),
        ("serve: {nnodes: 2}", "5:9: the serve flag 'nnodes' has no place in a recipe"),
        ("serve: {node-rank: 1}", "give the recipe nodes: {count: …}"),
        ("serve: {master-addr: h}", "NODE_RANK and HEAD_ADDR"),
        ("serve: {headless: true}", "the serve flag 'headless' has no place in a recipe"),
    ],
)
def test_a_mistake_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    write(tmp_path, "r", HEAD + text + "\n")
    assert says in refusals(tmp_path)[0]


@pytest.mark.parametrize(
    ("count", "gpus", "serve", "says"),
    [
        (1, 1, {"tensor-parallel-size": 8}, None),
        (2, None, {"tensor-parallel-size": 2}, None),
        (2, 2, {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}, None),
        (2, None, {}, "1 ranks cannot be spread evenly over 2 nodes"),
        (3, None, {"tensor-parallel-size": 4}, "found tensor-parallel-size 4; expected a multiple"),
        (2, 1, {"tensor-parallel-size": 4}, "each of 2 nodes would need 2 GPUs"),
        (2, 1, {"tensor-parallel-size": "4"}, None),  # of which the check of the flags speaks
    ],
)
def test_ranks_must_fit_the_nodes(
    count: int, gpus: int | None, serve: dict[str, Any], says: str | None
) -> None:
    errors = [str(e) for e in check_sizes(count, gpus, serve, Place(Path("r.yaml"), 5, 9))]
    assert len(errors) == (says is not None)
    assert all(e.startswith("r.yaml:5:9: ") and says in e for e in errors if says)


# This machine


def test_two_variables_are_enough() -> None:
    interface, address = own_address()
    seat = find_seat(plan_of(), {"NODE_RANK": "0", "HEAD_ADDR": address})
    assert seat is not None
    assert (seat.rank, seat.count, seat.head, seat.port) == (0, 2, address, 29501)
    assert (seat.address, seat.interface) == (address, interface)
    assert seat.environment == {
        "VLLM_HOST_IP": address,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }
    for value in ("node 0 of 2", f"VLLM_HOST_IP={address}", f"GLOO_SOCKET_IFNAME={interface}"):
        assert any(value in line for line in seat.told)


def test_what_is_set_wins_and_is_told_as_such() -> None:
    interface, address = own_address()
    environ = {"NODE_RANK": "1", "HEAD_ADDR": f"{address}:4711", "GLOO_SOCKET_IFNAME": "ib0"}
    seat = find_seat(plan_of(**{"master-port": 1234}), {**environ, "NCCL_IB_HCA": "mlx5_0"})
    assert seat is not None and seat.port == 4711
    assert seat.environment["GLOO_SOCKET_IFNAME"] == "ib0"
    assert seat.environment["NCCL_SOCKET_IFNAME"] == interface
    assert seat.environment["NCCL_IB_HCA"] == "mlx5_0"
    assert "GLOO_SOCKET_IFNAME=ib0 (set)" in seat.told
    plain = find_seat(plan_of(**{"master-port": 1234}), {"NODE_RANK": "1", "HEAD_ADDR": address})
    assert plain is not None and plain.port == 1234


def test_a_nodes_own_values_reach_vllm_over_the_recipes() -> None:
    _, address = own_address()
    plan = plan_of()
    environ = {"NODE_RANK": "1", "HEAD_ADDR": address, "NCCL_SOCKET_IFNAME": "ib0"}
    seat = find_seat(plan, environ)
    found = child_environment(plan, Path("/p/plan.json"), environ, seat)
    assert (found["NCCL_SOCKET_IFNAME"], found["VLLM_HOST_IP"], found["A"]) == ("ib0", address, "b")


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "NODE_RANK is not set; expected 0 to 1; set NODE_RANK: 0 on the head"),
        ({"NODE_RANK": "2"}, "NODE_RANK is no node of this recipe; found '2'; expected 0 to 1"),
        ({"NODE_RANK": "-1"}, "NODE_RANK is no node of this recipe"),
        ({"NODE_RANK": "one"}, "found 'one'"),
        ({"NODE_RANK": "1"}, "HEAD_ADDR is not set"),
        ({"NODE_RANK": "1", "HEAD_ADDR": "a b"}, "HEAD_ADDR is no address; found 'a b'"),
        ({"NODE_RANK": "1", "HEAD_ADDR": "tcp://a"}, "HEAD_ADDR is no address"),
        ({"NODE_RANK": "1", "HEAD_ADDR": "a:70000"}, "HEAD_ADDR is no address"),
        ({"NODE_RANK": "1", "HEAD_ADDR": "127.0.0.1"}, "leads to this machine's loopback"),
        ({"NODE_RANK": "0", "HEAD_ADDR": "[::1]:9"}, "found ::1 is ::1"),
        (
            {"NODE_RANK": "0", "HEAD_ADDR": "198.51.100.1"},
            "HEAD_ADDR is no address of this machine",
        ),
    ],
)
def test_what_cannot_be_is_refused(environ: dict[str, str], says: str) -> None:
    own_address()
    assert says in refusal(environ)


def test_a_rank_is_refused_where_the_recipe_is_for_one_node() -> None:
    assert "NODE_RANK is set, but the recipe is for one node" in refusal({"NODE_RANK": "1"}, 1)
    assert find_seat(plan_of(1), {}) is None
    assert find_seat(plan_of(1), {"NODE_RANK": "0", "HEAD_ADDR": "ignored"}) is None


def test_an_address_of_another_machine_is_refused_as_ones_own() -> None:
    _, address = own_address()
    environ = {"NODE_RANK": "1", "HEAD_ADDR": address, "VLLM_HOST_IP": "198.51.100.7"}
    assert "VLLM_HOST_IP is no address of this machine; found 198.51.100.7" in refusal(environ)


def test_a_node_waits_until_the_heads_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    _, address = own_address()
    real, asked, said = socket.getaddrinfo, [], list[str]()

    def slowly(host: str, *rest: Any, **more: Any) -> Any:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(-2, "Name or service not known")
        return real(address, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    monkeypatch.setattr(nodes, "POLL_SECONDS", 0)
    seat = find_seat(plan_of(), {"NODE_RANK": "1", "HEAD_ADDR": "box-a"}, said.append)
    assert seat is not None and (seat.head, seat.address) == ("box-a", address)
    assert len(said) == 1 and "waiting for the head: HEAD_ADDR box-a is not known yet" in said[0]


def test_vllms_flags_follow_from_the_seat() -> None:
    head = Seat(0, 2, "h", 9, "10.0.0.1", "eth0", {}, ())
    assert head.arguments({}) == [
        "--nnodes=2", "--node-rank=0", "--master-addr=h", "--master-port=9",
    ]  # fmt: skip
    worker = Seat(1, 2, "h", 9, "10.0.0.2", "eth0", {}, ())
    assert worker.arguments({"api-server-count": 2})[1:] == [
        "--node-rank=1", "--master-addr=h", "--master-port=9", "--headless",
        "--api-server-count=0",
    ]  # fmt: skip
    assert worker.arguments({"distributed-executor-backend": "ray"}) == []


def test_the_checks_before_a_start_see_the_plan_as_the_node_serves_it() -> None:
    worker = Seat(1, 2, "h", 9, "10.0.0.2", "eth0", {"GLOO_SOCKET_IFNAME": "eth0"}, ())
    plan = plan_of(port=8000)
    seen = seen_by(plan, worker)
    assert seen.serve == {"port": 8000, **worker.flags(plan.serve)} and seen.serve["headless"]
    assert seen.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert seen_here(plan, {}).serve == {"port": 8000, "nnodes": 2}
    assert seen_here(plan_of(1), {"NODE_RANK": "0", "HEAD_ADDR": "h"}) == plan_of(1)
    _, address = own_address()
    here = seen_here(plan, {"NODE_RANK": "0", "HEAD_ADDR": address})
    assert here.serve["master-addr"] == address and "headless" not in here.serve


# The build


def test_a_build_is_known_by_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from vllm_overlay.buildid import build_id; print(build_id())"

    def ask() -> str:
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
        return run.stdout.decode().strip()

    first = ask()
    assert first == ask() == buildid.build_id()
    package = tmp_path / "other-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (package / "RECORD").write_text("other.py,sha256=a,1\nother.cpython-311.pyc,,\n")
    second = ask()
    (package / "RECORD").write_text("other.py,sha256=a,1\n")
    third = ask()
    (package / "RECORD").write_text("other.py,sha256=b,1\n")
    assert first != second == third != ask()
    status = tmp_path / "status"
    status.write_text("Package: a\n")
    monkeypatch.setattr(buildid, "SYSTEM", status)
    with_system = buildid.build_id()
    status.write_text("Package: b\n")
    assert with_system != buildid.build_id()
