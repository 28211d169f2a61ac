"""Checks of ports, addresses, interfaces and RDMA: each made to fail on this machine."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.looks import child, look, only
from vllm_overlay.doctor import network

TWO_NODES = {"nnodes": 2}


@pytest.mark.parametrize(
    ("serve", "says"),
    [
        ({"port": 0}, "port 0 lets the system choose"),
        ({"port": -1}, "port -1 cannot be served on; expected 1 to 65535"),
        ({"port": 65536}, "port 65536 cannot be served on; expected 1 to 65535"),
        ({"port": 99999999999999999999}, "expected 1 to 65535"),
        ({"uds": "/run/vllm.sock"}, "'uds' is not taken"),
        ({"host": "a..b"}, "port 8000 on a..b cannot be used"),
    ],
)
def test_an_address_that_health_could_not_ask_is_refused(serve: dict[str, Any], says: str) -> None:
    assert says in only(network.ports(look(serve)), "fail").detail
    only(network.ports(look({**serve, "headless": True})), "ok")


def test_a_port_must_be_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        serve = {"host": "127.0.0.1", "port": port}
        assert "Address already in use" in only(network.ports(look(serve)), "fail").detail
        head = {"headless": True, **TWO_NODES, "master-addr": "127.0.0.1", "master-port": port}
        check = only(network.ports(look(head)), "fail")
        assert "-- --master-port NUMBER" in check.remedy
        only(network.ports(look({**head, "node-rank": 1})), "ok")  # only the head listens
    only(network.ports(look(serve)), "ok")


def test_an_address_that_is_not_of_this_machine() -> None:
    check = only(network.address(look(env={"VLLM_HOST_IP": "192.0.2.7"})), "fail")
    assert "192.0.2.7, and no interface of this machine has that address" in check.detail
    only(network.address(look(env={"VLLM_HOST_IP": "127.0.0.1"})), "ok")


def test_gloo_would_take_the_loopback(tmp_path: Path) -> None:
    """Debian gives a host's name the address 127.0.1.1."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 box7\n")
    setup = f"hostname box7; mount --bind {hosts} /etc/hosts"
    check = only(child(setup, network.address, namespace=True, serve=TWO_NODES), "fail")
    assert "the host's name box7 is 127.0.1.1, which Gloo takes" in check.detail
    assert check.remedy.startswith("set GLOO_SOCKET_IFNAME to the interface of one of ")
    only(child(setup, network.address, namespace=True, serve={}), "ok")
    named = {"GLOO_SOCKET_IFNAME": "eth0"}
    only(child(setup, network.address, namespace=True, serve=TWO_NODES, env=named), "ok")


@pytest.mark.parametrize(
    ("env", "serve", "says"),
    [
        ({"GLOO_SOCKET_IFNAME": "nope0"}, {}, "GLOO_SOCKET_IFNAME=nope0 names no interface"),
        ({"GLOO_SOCKET_IFNAME": "l"}, {}, "GLOO_SOCKET_IFNAME=l names no interface"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, {}, "NCCL_SOCKET_IFNAME==l names no interface"),
        ({"NCCL_SOCKET_IFNAME": "nope"}, {}, "NCCL_SOCKET_IFNAME=nope names no interface"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, TWO_NODES, "GLOO_SOCKET_IFNAME=lo names only the loopback"),
    ],
)
def test_a_variable_that_names_no_useful_interface(
    env: dict[str, str], serve: dict[str, Any], says: str
) -> None:
    (check,) = [item for item in network.interfaces(look(serve, env=env)) if item.state == "fail"]
    assert check.detail.startswith(says) and check.remedy


@pytest.mark.parametrize("value", ["lo", "l", "=lo", "^eth,docker,wl,en,ifb,br,veth"])
def test_nccl_s_ways_to_name_an_interface(value: str) -> None:
    check = only(network.interfaces(look(env={"NCCL_SOCKET_IFNAME": value})), "ok")
    assert "lo (MTU " in check.detail


def test_an_interface_that_is_down_or_narrow() -> None:
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    down = only(child("true", network.interfaces, namespace=True, env=env), "fail")
    assert "no interface of this machine that is up" in down.detail
    setup = "ip link set lo mtu 1400 up"
    narrow = only(child(setup, network.interfaces, namespace=True, env=env), "warn")
    assert narrow.detail.startswith("lo has an MTU of 1400")
    only(child("ip link set lo mtu 9000 up", network.interfaces, namespace=True, env=env), "ok")


def device(root: Path, *, state: str = "4: ACTIVE", mtu: int = 9000, passed: bool = True) -> Path:
    """Write what /sys says of an RDMA device over Ethernet, mlx5_0."""
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    interface = root / "sys/class/infiniband/mlx5_0/device/net/eth1"
    for folder in (port, interface):
        folder.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text("Ethernet\n")
    (interface / "mtu").write_text(f"{mtu}\n")
    if passed:
        (root / "dev/infiniband").mkdir(parents=True)
        (root / "dev/infiniband/uverbs0").write_text("")
    return root


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much memory may be pinned as wanted."""
    unlimited = network.resource.RLIM_INFINITY
    monkeypatch.setattr(network.resource, "getrlimit", lambda _: (unlimited, unlimited))


@pytest.mark.usefixtures("pinning")
@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"state": "1: DOWN"}, "mlx5_0 has no active port (1: DOWN)"),
        ({"mtu": 1500}, "mlx5_0 runs over eth1 with an MTU of 1500"),
        ({"passed": False}, "mlx5_0: this process has no /dev/infiniband/uverbs* to use it"),
    ],
)
def test_an_rdma_device_that_cannot_be_used(
    tmp_path: Path, about: dict[str, Any], says: str
) -> None:
    root = device(tmp_path, **about)
    assert only(network.rdma(look(root=root)), "warn").detail == says
    off = {"NCCL_IB_DISABLE": "1"}
    only(network.rdma(look(root=root, env=off)), "ok")


@pytest.mark.usefixtures("pinning")
def test_an_rdma_device_that_nccl_would_not_find(tmp_path: Path) -> None:
    root = device(tmp_path)
    only(network.rdma(look(root=root)), "ok")
    check = only(network.rdma(look(root=root, env={"NCCL_IB_HCA": "mlx5_1:1"})), "fail")
    assert "NCCL_IB_HCA names mlx5_1" in check.detail and check.remedy == "name one of mlx5_0"
    for named in ("mlx5", "=mlx5_0:1", "^mlx5_7"):
        only(network.rdma(look(root=root, env={"NCCL_IB_HCA": named})), "ok")
    only(network.rdma(look(root=tmp_path / "none")), "ok")


@pytest.mark.parametrize(("serve", "state"), [({}, "warn"), (TWO_NODES, "fail")])
def test_rdma_without_pinned_memory(tmp_path: Path, serve: dict[str, Any], state: str) -> None:
    root = str(device(tmp_path))
    found = child("ulimit -l 64", network.rdma, serve=serve, root=root)
    check = only(found, state)
    assert check.name == "memlock"
    assert check.detail == "memlock is limited to 64 KiB, and RDMA pins its buffers"
