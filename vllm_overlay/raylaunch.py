"""Ray's part of a launch: its own commands start its nodes, and its job carries the plan."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from vllm_overlay.activate import PLAN_VARIABLE
from vllm_overlay.activate.statement import PER_NODE
from vllm_overlay.errors import ConfigError
from vllm_overlay.folders import FOLDER_VARIABLES
from vllm_overlay.nodes import Seat
from vllm_overlay.plan import Plan

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray reads the configuration of the driver's job from it
ADDRESS = "RAY_ADDRESS"
QUIET = ("--disable-usage-stats",)


def check_ray() -> list[ConfigError]:
    """Return why vLLM cannot use Ray here, if it cannot."""
    if importlib.util.find_spec("ray") is not None:
        return []
    return [
        ConfigError(
            "the recipe's distributed-executor-backend is ray, and Ray is not installed",
            expected="the pinned Ray of this package's extra 'ray'",
            remedy="build the image with --build-arg RAY=1, or install vllm-overlay[ray]",
        )
    ]


def job_config(plan: Plan, plan_path: Path) -> dict[str, object]:
    """Return the configuration of the driver's job: every actor starts with the plan's variables.

    What may differ between nodes is each node's own.
    """
    variables = {name: value for name, value in plan.env.items() if name not in PER_NODE}
    return {"runtime_env": {"env_vars": {**variables, PLAN_VARIABLE: str(plan_path)}}}


def ray_driver(plan: Plan, environment: Mapping[str, str], seat: Seat | None) -> dict[str, str]:
    """Start Ray on the head, unless RAY_ADDRESS names a cluster; return the driver's variables."""
    added = {JOB: json.dumps(job_config(plan, Path(environment[PLAN_VARIABLE])))}
    if seat is None or environment.get(ADDRESS):
        return added
    start = (*_start(seat), "--head", f"--port={seat.port}", "--include-dashboard=false")
    run = subprocess.run(
        start,
        env=raylet_environment(environment, seat),
        stdout=sys.stderr.fileno(),
        check=False,
    )
    if run.returncode:
        raise ConfigError(
            "Ray does not start on the head",
            found=f"{' '.join(start)} ended with {run.returncode}",
            remedy=f"read what it said above, or name a running cluster with {ADDRESS}",
        )
    return {**added, ADDRESS: f"{seat.address}:{seat.port}"}


def ray_worker(seat: Seat) -> tuple[str, ...]:
    """Return the command that this node is replaced by: Ray's, until the head is gone."""
    return (*_start(seat), f"--address={seat.head}:{seat.port}", "--block")


def raylet_environment(environ: Mapping[str, str], seat: Seat) -> dict[str, str]:
    """Return the environment of a node's Ray: the caller's and the node's, without the plan.

    An actor has the plan from its job alone: one that another job starts here runs no fix.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in (*FOLDER_VARIABLES, PLAN_VARIABLE, JOB)
    }
    return {**kept, **seat.environment}


def _start(seat: Seat) -> tuple[str, ...]:
    command = Path(sys.executable).parent / "ray"
    return (str(command), "start", f"--node-ip-address={seat.address}", *QUIET)
