"""Checks of the network: the server's port, this node's address, interfaces, RDMA devices."""

from __future__ import annotations

import re
import resource
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from vllm_overlay.doctor.check import FAIL, OK, WARN, Check, Look, failed
from vllm_overlay.errors import ConfigError
from vllm_overlay.plan import Plan

DEFAULT_PORT = 8000  # vLLM's own
MASTER_PORT = 29501  # vLLM's own
MAX_PORT = 65535
LEAST_MTU = 1500
ROCE_MTU = 4200  # an RDMA payload of 4096 bytes with its headers
EXACT = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")  # names; NCCL's may be the beginnings of names


def port_of(plan: Plan) -> int:
    """Return the port on which the server listens; that of vLLM for a value that is no number."""
    port = plan.serve.get("port")
    return port if isinstance(port, int) else DEFAULT_PORT


def ports(look: Look) -> list[Check]:
    """Check that the server can listen where `health` will ask, and the head for its ranks.

    vLLM would say so too, but only after the model has loaded.
    """
    plan = look.plan
    if plan is None:
        return []
    errors = [] if plan.serve.get("headless") else _server_port(plan)
    if look.nodes > 1 and not plan.serve.get("node-rank") and plan.serve.get("master-addr"):
        port = plan.serve.get("master-port")
        master = port if isinstance(port, int) else MASTER_PORT
        errors += _in_use(str(plan.serve["master-addr"]), master, "-- --master-port NUMBER")
    if errors:
        return failed("ports", errors)
    what = "headless" if plan.serve.get("headless") else f"{port_of(plan)} is free"
    return [Check("ports", OK, what)]


def _server_port(plan: Plan) -> list[ConfigError]:
    if plan.serve.get("uds"):
        what = "the serve flag 'uds' is not taken: health and smoke reach the server over TCP"
        return [ConfigError(what, remedy="remove it, and give 'host' and 'port'")]
    host, port = str(plan.serve.get("host") or ""), port_of(plan)
    if not 1 <= port <= MAX_PORT:
        what = f"the port {port} cannot be served on"
        if port == 0:
            what = "the port 0 lets the system choose, and health would not know which"
        remedy = "give another: `-- --port NUMBER`"
        return [ConfigError(what, expected=f"1 to {MAX_PORT}", remedy=remedy)]
    return _in_use(host, port, "-- --port NUMBER")


def _in_use(host: str, port: int, flag: str) -> list[ConfigError]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be a host's
        return [
            ConfigError(
                f"port {port} on {host or 'all addresses'} cannot be used",
                found=getattr(error, "strerror", None) or error,
                expected="a free port",
                remedy=f"stop what listens there, or give another: `{flag}`",
            )
        ]
    return []


def address(look: Look) -> list[Check]:
    """Check the address under which other nodes reach this one; Gloo's default may be loopback."""
    own = look.env.get("VLLM_HOST_IP")
    if own and not _is_here(own):
        detail = f"VLLM_HOST_IP is {own}, and no interface of this machine has that address"
        return [Check("address", FAIL, detail, f"set it to one of {_addresses() or 'none'}")]
    shown = f"VLLM_HOST_IP is {own or 'not set'}"
    if look.nodes == 1:  # and no question that a name server might take long to answer
        return [Check("address", OK, f"{shown}; one node needs no more")]
    name = socket.gethostname()
    try:
        resolved = socket.gethostbyname(name)
    except OSError:
        resolved = ""
    loopback = not resolved or resolved.startswith("127.")
    found = f"the host's name {name} is {resolved or 'no address'}"
    if loopback and not look.env.get("GLOO_SOCKET_IFNAME"):
        detail = f"{found}, which Gloo takes, and no other node reaches it"
        remedy = f"set GLOO_SOCKET_IFNAME to the interface of one of {_addresses() or 'none'}"
        return [Check("address", FAIL, detail, remedy)]
    return [Check("address", OK, f"{found}; {shown}")]


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _addresses() -> str:
    """Return this machine's addresses that are not of the loopback, with their interfaces."""
    found = [
        f"{item.address} ({name})"
        for name, items in psutil.net_if_addrs().items()
        for item in items
        if item.family == socket.AF_INET and not item.address.startswith("127.")
    ]
    return ", ".join(found)


def interfaces(look: Look) -> list[Check]:
    """Check that the interfaces that variables name exist, are up, and carry whole frames."""
    stats = psutil.net_if_stats()
    checks = []
    used: list[str] = []
    for variable in (*EXACT, "NCCL_SOCKET_IFNAME"):
        text = look.env.get(variable)
        if not text:
            continue
        matched = _matched(text, list(stats), exact=variable in EXACT)
        used += matched
        up = [name for name in matched if stats[name].isup]
        lost = look.nodes > 1 and set(matched) == {"lo"}
        if not up or lost:
            why = "only the loopback" if lost else "no interface of this machine that is up"
            remedy = f"name one of {', '.join(sorted(set(stats) - {'lo'})) or 'none'}"
            checks.append(Check("interfaces", FAIL, f"{variable}={text} names {why}", remedy))
    if look.nodes > 1 and not used:
        used = [name for name, item in stats.items() if item.isup and name != "lo"]
    for name in dict.fromkeys(used):
        if stats[name].mtu < LEAST_MTU:
            detail = f"{name} has an MTU of {stats[name].mtu}: every message is cut in more pieces"
            remedy = f"raise it to that of the network: ip link set {name} mtu {LEAST_MTU}"
            checks.append(Check("interfaces", WARN, detail, remedy))
    shown = ", ".join(f"{name} (MTU {stats[name].mtu})" for name in dict.fromkeys(used))
    return checks or [Check("interfaces", OK, shown or "no variable names one")]


def _matched(text: str, names: Sequence[str], *, exact: bool) -> list[str]:
    """Return the interfaces that a variable means. NCCL's: ``^`` excludes, ``=`` is exact."""
    exclude = not exact and text.startswith("^")
    text = text.removeprefix("^") if exclude else text
    whole = exact or text.startswith("=")
    wanted = [item.strip() for item in text.removeprefix("=").split(",") if item.strip()]
    hits = [
        name
        for name in names
        if (name in wanted if whole else any(name.startswith(item) for item in wanted))
    ]
    return [name for name in names if name not in hits] if exclude else hits


def rdma(look: Look) -> list[Check]:
    """Check the RDMA devices: that NCCL's choice exists, a port is up, and memory can be pinned."""
    folder = look.root / "sys/class/infiniband"
    devices = sorted(item.name for item in folder.glob("*"))
    wanted = look.env.get("NCCL_IB_HCA", "")
    known = [item.partition(":")[0] for item in wanted.lstrip("^=").split(",") if item]
    missing = [name for name in known if not any(d.startswith(name) for d in devices)]
    if missing and not wanted.startswith("^"):
        detail = f"NCCL_IB_HCA names {', '.join(missing)}, and this machine has no such device"
        return [Check("rdma", FAIL, detail, f"name one of {', '.join(devices) or 'none'}")]
    if not devices:
        return [Check("rdma", OK, "no RDMA device")]
    if look.env.get("NCCL_IB_DISABLE") == "1":
        return [Check("rdma", OK, f"{', '.join(devices)}: not used, NCCL_IB_DISABLE is 1")]
    checks = _rdma_state(look.root, folder, devices)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        detail = f"memlock is limited to {soft // 2**10} KiB, and RDMA pins its buffers"
        remedy = "lift it: ulimits memlock -1 in compose, --ulimit memlock=-1 of docker run"
        checks.append(Check("memlock", FAIL if look.nodes > 1 else WARN, detail, remedy))
    return checks or [Check("rdma", OK, ", ".join(devices))]


def _rdma_state(root: Path, folder: Path, devices: Sequence[str]) -> list[Check]:
    checks = []
    if not list((root / "dev/infiniband").glob("uverbs*")):
        detail = f"{', '.join(devices)}: this process has no /dev/infiniband/uverbs* to use it"
        remedy = "pass the devices on: --device /dev/infiniband of docker run, devices in compose"
        checks.append(Check("rdma", WARN, detail, remedy))
    for name in devices:
        states = [_text(file) for file in sorted(folder.glob(f"{name}/ports/*/state"))]
        if not any("ACTIVE" in state for state in states):
            detail = f"{name} has no active port ({', '.join(states) or 'none at all'})"
            checks.append(Check("rdma", WARN, detail, "connect it, or leave it out: NCCL_IB_HCA"))
        for file in sorted(folder.glob(f"{name}/device/net/*/mtu")):
            mtu = _text(file)
            if mtu.isdecimal() and int(mtu) < ROCE_MTU and _ethernet(folder / name):
                detail = f"{name} runs over {file.parent.name} with an MTU of {mtu}"
                remedy = f"raise it to {ROCE_MTU} or more, on the switch too"
                checks.append(Check("rdma", WARN, detail, remedy))
    return checks


def _ethernet(device: Path) -> bool:
    layers = [_text(file) for file in device.glob("ports/*/link_layer")]
    return any(re.fullmatch("ethernet", layer, re.IGNORECASE) for layer in layers)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
