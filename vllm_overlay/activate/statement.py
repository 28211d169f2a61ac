"""What a rank says of itself to the head, and where two of them differ. Standard library only."""

from __future__ import annotations

import os
import re
import sys

from vllm_overlay.activate.receipt import (
    ENVIRONMENT_PREFIXES,
    SECRET_WORDS,
    process_title,
    role_of,
)

TYPE_CHECKING = False  # importing typing costs more than the rest of the start
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

# What may differ between nodes: the names of addresses and devices.
PER_NODE = (
    "VLLM_HOST_IP",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "UCX_NET_DEVICES",
)
PATIENCE = 180.0  # seconds in which a head must show itself to be told: nodes start in any order
UNSET = "unset"
SHOWN = 80  # characters of a value in a message
LOGIN = re.compile(r"(?<=//)[^/\s@]+(?=@)")
# What a reader is told first, if several things differ: the rest mostly follows from it. A cache's
# folder, for one, follows from the fixes.
ORDER = [
    re.compile(pattern)
    for pattern in (
        r"vllm\.(version|imported)",
        r"torch\.|vllm\.torch",
        r"fixes\..*\.digest",
        r"recipe\.|serve\.",
        r"(env|environment)\.(?!VLLM_CACHE_ROOT|TRITON_|TORCHINDUCTOR_|FLASHINFER_|VLLM_OVERLAY_PLAN)",
        r"fixes\.|modules\.",
        r"(?!(cache_key|digest|env|environment)\b)",
        r"env|environment",
    )
]


def compared(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must be the same on every node; secrets stay out of it."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(ENVIRONMENT_PREFIXES)
        and name not in PER_NODE
        and not any(word in name for word in SECRET_WORDS)
    }


def facts(plan: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return what every rank must have in common, by dotted keys: the plan, part by part, what
    this process has imported, and its environment.
    """
    found: dict[str, str] = {}
    _flatten("", plan, found)
    for name in ("vllm", "torch"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[f"{name}.imported"] = str(version)
    found |= {f"environment.{name}": value for name, value in compared(environ).items()}
    return found


def _flatten(prefix: str, value: Any, found: dict[str, str]) -> None:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        # A fix under its name: an index would call every fix behind a missing one different.
        items = [(str(v.get("name", i)), v) for i, v in enumerate(value)]  # type: ignore[assignment]
    else:
        found[prefix] = value if isinstance(value, str) else repr(value)
        return
    for key, inner in items:
        _flatten(f"{prefix}.{key}" if prefix else str(key), inner, found)


def differences(head: Mapping[str, str], other: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (key, the head's value, the other's), what explains the rest first."""
    keys = [key for key in {*head, *other} if head.get(key) != other.get(key)]
    found = [(key, head.get(key, UNSET), other.get(key, UNSET)) for key in keys]
    return sorted(found, key=lambda item: (_order(item[0]), item[0]))


def _order(key: str) -> int:
    return next((i for i, pattern in enumerate(ORDER) if pattern.match(key)), len(ORDER))


def told(found: list[tuple[str, str, str]], rank: object, host: str, head: str) -> str:
    """Return the line on a rank that differs from the head."""
    key, mine, other = found[0]
    more = f" (and {len(found) - 1} more: {', '.join(k for k, _, _ in found[1:4])})" * bool(
        found[1:]
    )
    return (
        f"rank {rank} on {host} differs from the head on {head} in {key}: "
        f"{_short(other)} on {host}, {_short(mine)} on {head}{more}"
    )


def _short(value: str) -> str:
    text = LOGIN.sub("…", value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def run_record(folder: str) -> dict[str, Any] | None:
    """Return the run record of the server that this process belongs to, or None."""
    import json

    for key in _line():
        try:
            with open(f"{folder}/runs/{key}.json", "rb") as file:
                record: dict[str, Any] = json.load(file)
                return record
        except (OSError, ValueError):
            continue
    return None


def family_state(folder: str) -> str:
    """Return whether vLLM's processes above this rank, which serve too, run the plan as well.

    On the head those are EngineCore and the API server. Their receipts lie in ``folder``, the
    plan's. Where one has none, the answer is like no other node's.
    """
    without = []
    for key in _line():
        pid = int(key.partition("-")[0])
        try:
            role = role_of(process_title(pid))
        except OSError:  # it has just ended, and this rank will follow
            continue
        if role != "other" and pid != os.getpid():
            without += [f"{role} {pid}"] * (not os.path.exists(f"{folder}/receipts/{key}.json"))
        if os.path.exists(f"{folder}/runs/{key}.json"):  # the main process
            break
    if without:
        return f"without the plan on {os.uname().nodename}: {', '.join(without)}"
    return "all with the plan"


def _line() -> Iterator[str]:
    """Yield ``<pid>-<start>`` of this process, and of each above it."""
    pid = os.getpid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return
        yield f"{pid}-{int(fields[19])}"
        pid = int(fields[1])
