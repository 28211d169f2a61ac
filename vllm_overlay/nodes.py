"""Which of a recipe's nodes this machine is, and the addresses that follow from it.

Two variables say it: NODE_RANK and HEAD_ADDR. All else is derived from the address from which this
machine reaches the head, and can be set. Nothing of it is part of the plan, which is the same on
every node.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any

import psutil

from vllm_overlay.activate.statement import PER_NODE
from vllm_overlay.errors import ConfigError
from vllm_overlay.plan import Plan

RANK, HEAD = "NODE_RANK", "HEAD_ADDR"
DEFAULT_PORT = 29501  # vLLM's own master-port
RAY_PORT = 6379  # Ray's own
PROGRESS_SECONDS = 10.0
POLL_SECONDS = 0.5
SIZES = (
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "prefill-context-parallel-size",
    "data-parallel-size",
)


@dataclass(frozen=True)
class Seat:
    """This machine among the nodes of a plan.

    ``head`` is what HEAD_ADDR names, ``port`` that of the ranks' rendezvous, ``address`` this
    machine's on the way to the head and ``interface`` the one that has it. ``environment`` are the
    variables to set; ``told`` says for each derived value where it is from.
    """

    rank: int
    count: int
    head: str
    port: int
    address: str
    interface: str
    environment: Mapping[str, str]
    told: tuple[str, ...]

    def flags(self, serve: Mapping[str, Any]) -> dict[str, Any]:
        """Return vLLM's flags for this node; ``serve`` are those of the plan."""
        if uses_ray(serve):
            return {}
        found: dict[str, Any] = {
            "nnodes": self.count,
            "node-rank": self.rank,
            "master-addr": self.head,
            "master-port": self.port,
        }
        if self.rank:
            found["headless"] = True
            if "api-server-count" in serve:  # a headless node takes no other value
                found["api-server-count"] = 0
        return found

    def arguments(self, serve: Mapping[str, Any]) -> list[str]:
        """Return those flags as vLLM's arguments, which come last and so win."""
        return [
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in self.flags(serve).items()
        ]

    def record(self, serve: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the run record keeps of it; ``nnodes`` if vLLM's own launch is used."""
        return {
            "nnodes": not uses_ray(serve),
            "rank": self.rank,
            "count": self.count,
            "head": self.head,
            "port": self.port,
            "address": self.address,
            "interface": self.interface,
        }


def seen_by(plan: Plan, seat: Seat | None) -> Plan:
    """Return the plan as this node serves it, for the checks before a start."""
    if not plan.nodes:
        return plan
    flags = seat.flags(plan.serve) if seat else {"nnodes": plan.nodes["count"]}
    own = seat.environment if seat else {}
    return replace(plan, serve={**plan.serve, **flags}, env={**plan.env, **own})


def seen_here(plan: Plan, environ: Mapping[str, str]) -> Plan:
    """Return the plan as the node would serve it that the environment names, if it names one."""
    named = RANK in environ and HEAD in environ
    return seen_by(plan, find_seat(plan, environ) if named else None)


def uses_ray(serve: Mapping[str, Any]) -> bool:
    """Whether vLLM's workers are Ray's actors."""
    return serve.get("distributed-executor-backend") == "ray"


def check_sizes(
    count: int, gpus: int | None, serve: Mapping[str, Any], place: Any
) -> list[ConfigError]:
    """Return why the model's ranks cannot be spread over ``count`` nodes of ``gpus`` GPUs each."""
    if count == 1:
        return []
    given = {name: serve.get(name, 1) for name in SIZES}
    if not all(isinstance(value, int) for value in given.values()):
        return []  # the check of the flags has said so
    world = 1
    for value in given.values():
        world *= value
    named = " x ".join(f"{name} {value}" for name, value in given.items() if value != 1) or "1"
    if world % count:
        what = f"{world} ranks cannot be spread evenly over {count} nodes"
        remedy = f"change nodes.count, or {' or '.join(SIZES[:2])}"
        return [place.error(what, found=named, expected=f"a multiple of {count}", remedy=remedy)]
    if gpus is not None and world // count > gpus:
        what = f"each of {count} nodes would need {world // count} GPUs"
        remedy = "raise nodes.count, or correct nodes.per-node.gpus"
        return [place.error(what, found=named, expected=f"at most {gpus} a node", remedy=remedy)]
    return []


def find_seat(
    plan: Plan, environ: Mapping[str, str], say: Callable[[str], None] | None = None
) -> Seat | None:
    """Return which node this machine is, or None for a plan of one node.

    Waits, with a line every ten seconds, while the head's name is not known yet: nodes start in
    any order. Raises ConfigError for a variable that is missing or cannot be.
    """
    count = plan.nodes.get("count", 1)
    rank = _rank(environ, count)
    if count == 1:
        return None
    host, port = head_of(environ, plan.serve)
    resolved = _resolve(host, port, say or _say)
    address = environ.get("VLLM_HOST_IP") or _source_of(resolved, host)
    interface = _interface_of(address)
    if rank == 0 and _source_of(resolved, host) != resolved[4][0]:
        raise ConfigError(
            f"{HEAD} is no address of this machine, and {RANK}=0 says that it is the head",
            file="environment",
            found=f"{host} ({resolved[4][0]})",
            expected="an address of this machine that the other nodes reach",
            remedy=f"set {HEAD} to it on every node, or another {RANK} here",
        )
    derived = {
        "VLLM_HOST_IP": address,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }
    environment = {name: environ[name] for name in PER_NODE if name in environ}
    told = [f"node {rank} of {count}, head {host} ({resolved[4][0]}), port {port}"]
    for name, value in derived.items():
        mine = environ.get(name)
        told.append(f"{name}={mine or value} ({'set' if mine else f'on the way to {host}'})")
        environment.setdefault(name, value)
    return Seat(rank, count, host, port, address, interface, environment, tuple(told))


def _rank(environ: Mapping[str, str], count: int) -> int:
    text = environ.get(RANK, "")
    if count == 1 and text in ("", "0"):
        return 0
    if re.fullmatch(r"\d{1,6}", text) and int(text) < count:
        return int(text)
    what = f"{RANK} is not set" if not text else f"{RANK} is no node of this recipe"
    remedy = f"set {RANK}: 0 on the head, another on each other node"
    if count == 1:
        what, remedy = f"{RANK} is set, but the recipe is for one node", f"unset {RANK}"
    raise ConfigError(
        what,
        file="environment",
        found=repr(text) if text else None,
        expected=f"0 to {count - 1}",
        remedy=remedy,
    )


def head_of(environ: Mapping[str, str], serve: Mapping[str, Any]) -> tuple[str, int]:
    """Return (host, port) of HEAD_ADDR: ``name``, ``name:port``, ``1.2.3.4``, ``[::1]:port``.

    Raises ConfigError for any other text. ``serve`` are the plan's flags.
    """
    text = environ.get(HEAD, "").strip()
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/]+))(?::(\d{1,5}))?", text)
    if text.count(":") > 1 and not match:
        match = re.fullmatch(r"([0-9A-Fa-f:.]+)()()", text)
    default = RAY_PORT if uses_ray(serve) else serve.get("master-port", DEFAULT_PORT)
    port = int(match[3] if match and match[3] else default)
    if match is None or not 1 <= port <= 65535:
        raise ConfigError(
            f"{HEAD} is no address" if text else f"{HEAD} is not set",
            file="environment",
            found=repr(text) if text else None,
            expected="the head's name or IP address, and perhaps :PORT",
            remedy=f"set {HEAD} to the same on every node",
        )
    return match[1] or match[2], port


def _resolve(host: str, port: int, say: Callable[[str], None]) -> tuple[Any, ...]:
    """Return the first of getaddrinfo's answers, waiting until there is one."""
    said = 0.0
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        except (OSError, UnicodeError) as error:
            if time.monotonic() - said > PROGRESS_SECONDS or not said:
                said = time.monotonic()
                say(f"waiting for the head: {HEAD} {host} is not known yet ({error})")
            time.sleep(POLL_SECONDS)
            continue
        if ip_address(str(found[4][0]).partition("%")[0]).is_loopback:
            raise ConfigError(
                f"{HEAD} leads to this machine's loopback, where no other node is",
                file="environment",
                found=f"{host} is {found[4][0]}",
                expected="an address that every node reaches",
                remedy=f"set {HEAD} to it, or mend the line of /etc/hosts",
            )
        return found


def _source_of(resolved: Sequence[Any], host: str) -> str:
    """Return the address from which this machine reaches the head. Nothing is sent."""
    try:
        with socket.socket(resolved[0], socket.SOCK_DGRAM) as probe:
            probe.connect(resolved[4])
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise ConfigError(
            "no route leads to the head",
            file="environment",
            found=f"{HEAD} {host} ({resolved[4][0]}): {error.strerror}",
            remedy="connect this machine to the head's network",
        ) from None


def _interface_of(address: str) -> str:
    known = psutil.net_if_addrs()
    for name, addresses in known.items():
        if any(item.address.partition("%")[0] == address for item in addresses):
            return name
    raise ConfigError(
        "VLLM_HOST_IP is no address of this machine",
        file="environment",
        found=address,
        expected=", ".join(sorted({i.address for a in known.values() for i in a if i.netmask})),
        remedy="unset it: it is derived from the way to the head",
    )


def _say(line: str) -> None:
    print(f"vllm-overlay: {line}", file=sys.stderr, flush=True)
