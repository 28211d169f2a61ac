"""Starts vLLM with a plan: checks the machine, writes the plan, and becomes vLLM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from vllm_overlay.activate import PLAN_VARIABLE
from vllm_overlay.activate.family import refused_since
from vllm_overlay.activate.receipt import process_key
from vllm_overlay.activate.statement import compared
from vllm_overlay.doctor import examine
from vllm_overlay.doctor.check import WARN, refusals
from vllm_overlay.doctor.network import port_of
from vllm_overlay.errors import ConfigError, raise_all
from vllm_overlay.folders import FOLDER_VARIABLES
from vllm_overlay.inuse import hold
from vllm_overlay.nodes import Seat, find_seat, seen_by, seen_here, uses_ray
from vllm_overlay.plan import Plan, fill_store, write_file, write_plan
from vllm_overlay.processes import alive
from vllm_overlay.raylaunch import check_ray, ray_driver, ray_worker, raylet_environment
from vllm_overlay.receipts import NAME, of_this_host
from vllm_overlay.recipe_format import CACHE_VARIABLES
from vllm_overlay.resolve import Resolution

RETRY_SECONDS = 60.0  # from the refusal of a node to its next start
PROOF = "import sys; sys.exit(0 if 'vllm_overlay.activate.finder' in sys.modules else 3)"


@dataclass(frozen=True)
class Launch:
    """What this process is replaced by: vLLM's command line and its environment.

    ``warnings`` are of the checks that did not forbid it.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    warnings: tuple[str, ...]


def place(resolution: Resolution, environ: Mapping[str, str]) -> Seat | None:
    """Return which node of the plan this machine is; None for a plan of one.

    May wait for the head's name, so that what forbids the launch is raised before: ConfigError(s).
    """
    if resolution.plan.nodes:
        raise_all(resolution.errors)
    return find_seat(resolution.plan, environ)


def here(resolution: Resolution, environ: Mapping[str, str]) -> Resolution:
    """Return what the checks look at: the plan as the node of this environment would serve it."""
    return replace(resolution, plan=seen_here(resolution.plan, environ))


def prepare(
    resolution: Resolution, home: Path, environ: Mapping[str, str], seat: Seat | None = None
) -> Launch:
    """Check the machine, then write the plan, the patched sources and word of this server.

    ``seat`` is this machine's among several nodes.

    Raises ConfigError(s) for whatever forbids the launch, before anything is written if it can
    be known by then.
    """
    plan = resolution.plan
    seen = replace(resolution, plan=seen_by(plan, seat))
    checks = examine(seen, home, environ)
    with_ray = uses_ray(plan.serve)
    missing = check_ray() if with_ray else []
    raise_all([*resolution.errors, *missing, *refusals(checks)])
    own = seat.arguments(plan.serve) if seat else []
    command = (sys.executable, vllm_script(), "serve", *resolution.argv, *own)
    hold(home, while_serving=False)
    hold(plan.folder(home), while_serving=True)
    fill_store(resolution.modules, home)
    plan_path = write_plan(plan, home)
    environment = child_environment(plan, plan_path, environ, seat)
    for name in CACHE_VARIABLES:
        _make_folder(Path(plan.env[name]))
    _prove_activation(environment)
    if plan.nodes:
        rest(plan.folder(home))
    _clean(plan.folder(home))
    if with_ray and seat and seat.rank:
        command = ray_worker(seat)
        environment = raylet_environment(environ, seat)
    elif with_ray:
        environment |= ray_driver(plan, environment, seat)
    _write_run(plan, home, environment, seat)
    return Launch(command, environment, tuple(c.line() for c in checks if c.state == WARN))


def rest(folder: Path) -> None:
    """Wait until this node's last refusal is a minute old; ``folder`` is the plan's.

    A supervisor starts it again at once, and all that a try costs is of no use before someone has
    mended the mistake. That may be another node's, so trying is right.
    """
    last = max(refused_since(str(folder), 0), key=_time_of, default={})
    left = min(RETRY_SECONDS, _time_of(last) + RETRY_SECONDS - time.time())
    if left > 0:
        line = f"this node was refused ({last['line']}); it tries again in {left:.0f} s"
        print(f"vllm-overlay: {line}", file=sys.stderr, flush=True)
        time.sleep(left)


def _time_of(failure: Mapping[str, Any]) -> float:
    """Return when a process was refused, in seconds since the epoch; 0 if nobody knows."""
    return float(failure.get("at", 0))


def become(launch: Launch) -> NoReturn:
    """Replace this process by vLLM: pid and start time stay, so the record of the server holds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(launch.command[0], launch.command, launch.environment)


def child_environment(
    plan: Plan, plan_path: Path, environ: Mapping[str, str], seat: Seat | None = None
) -> dict[str, str]:
    """Return vLLM's environment: the caller's, the plan's on top, this node's, the plan's path."""
    kept = {name: value for name, value in environ.items() if name not in FOLDER_VARIABLES}
    own = seat.environment if seat else {}
    return {**kept, **plan.env, **own, PLAN_VARIABLE: str(plan_path)}


def vllm_script() -> str:
    """Return vLLM's command in this Python's environment. Raises ConfigError if there is none."""
    script = Path(sys.executable).parent / "vllm"
    found = str(script) if script.is_file() else shutil.which("vllm")
    if found is None:
        raise ConfigError(
            "vLLM's command is missing",
            found=f"no {script}",
            remedy="install vLLM into this Python",
        )
    return found


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "a cache folder cannot be made",
            file=path,
            found=error.strerror,
            remedy="make the state folder writable, or name another with VLLM_OVERLAY_HOME",
        ) from None


def _prove_activation(environment: Mapping[str, str]) -> None:
    """A Python started like vLLM's must have the plan active, or nothing is launched."""
    run = subprocess.run([sys.executable, "-c", PROOF], env=dict(environment), check=False)
    if run.returncode:
        raise ConfigError(
            "the plan does not become active when Python starts",
            found=f"{sys.executable} ended with {run.returncode}",
            expected="vllm_overlay.pth in its site-packages",
            remedy="reinstall vllm-overlay into this Python",
        )


def _clean(folder: Path) -> None:
    """Remove this host's failures of earlier starts, and what its dead processes left.

    Other hosts may share the folder: theirs is theirs. Raises ConfigError where it is read-only.
    """
    dead = [
        path
        for path in [*folder.glob("receipts/*.json"), *folder.glob("runs/*.json")]
        if (match := NAME.fullmatch(path.name)) and not alive(int(match[1]), int(match[2]))
    ]
    for path in [*folder.glob("failures/*.json"), *dead]:
        try:
            if of_this_host(path):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                "what an earlier start left cannot be removed",
                file=path,
                found=error.strerror,
                remedy="make the state folder writable, or name another with VLLM_OVERLAY_HOME",
            ) from None


def _write_run(plan: Plan, home: Path, environment: Mapping[str, str], seat: Seat | None) -> None:
    """Leave word of the server that this process becomes: exec keeps pid and start time."""
    pid, start = process_key()
    record: dict[str, Any] = {
        "schema": 1,
        "host": os.uname().nodename,
        "pid": pid,
        "start": start,
        "plan": plan.digest,
        "bind_host": plan.serve.get("host"),
        "port": port_of(plan),
        "served_model": plan.served_model,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "recipe": plan.recipe["name"],
        "smoke": plan.smoke,
    }
    if seat:
        record |= {"node": seat.record(plan.serve), "environment": compared(environment)}
    path = plan.folder(home) / "runs" / f"{pid}-{start}.json"
    write_file(path, (json.dumps(record, indent=1) + "\n").encode())
