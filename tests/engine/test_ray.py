"""Ray's actors: a real Ray and vLLM's own worker class. vLLM serves on no CPU through Ray."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fixes import write_recipe
from tests.support.plans import write_fixes_plan
from tests.support.ranks import PLAN
from tests.support.rays import cluster, with_ray
from tests.support.serving import cli, environment
from vllm_overlay.activate import PLAN_VARIABLE
from vllm_overlay.nodes import Seat
from vllm_overlay.raylaunch import JOB, job_config, ray_worker, raylet_environment

FIXES = Path(__file__).resolve().parents[2] / "fixes"
DRIVER = """
import json, os, sys
from types import SimpleNamespace as Some
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc
config = Some(logging_config=None, parallel_config=Some(world_size=1))
actor = ray.remote(RayWorkerProc).options(num_cpus=0).remote(config, 0, None, False)
try:
    print(ray.get(actor.create_dist_init_method.remote(), timeout=120))
except ray.exceptions.RayActorError as error:
    print("died", error)
print("session", ray._private.worker._global_node.get_session_dir_path())
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    return write_fixes_plan(FIXES, home, names={"truncate-to-fit"})


@pytest.fixture(scope="module")
def address(plan: Path) -> Iterator[str]:
    """A Ray that was started without the plan, as `serve` starts it."""
    seat = Seat(0, 2, "a", 6379, "127.0.0.1", "lo", {}, ())
    started = environment(plan.parent, {PLAN_VARIABLE: str(plan), "VLLM_TARGET_DEVICE": "cpu"})
    with cluster(raylet_environment(started, seat)) as found:
        yield found


def drive(address: str, plan: Path, **env: str) -> tuple[str, Path]:
    """Start vLLM's worker class as an actor; return what became of it, and Ray's log folder."""
    own = {PLAN_VARIABLE: str(plan), "VLLM_TARGET_DEVICE": "cpu", **env}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, address],
        env=with_ray(environment(plan.parent, own)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Ray itself may have said something between our lines, or after them.
    (session,) = re.findall(r"^session (.*)", done.stdout, re.M)
    return done.stdout, Path(session) / "logs"


def applied(plan: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_bytes()) for file in plan.parent.glob("receipts/*.json")]


def test_actors_have_the_plan_through_the_jobs_runtime_environment(
    plan: Path, address: str
) -> None:
    said, _ = drive(address, plan, **{JOB: json.dumps(job_config(PLAN, plan))})
    assert "tcp://" in said
    actors = [receipt for receipt in applied(plan) if receipt["title"].startswith("ray::")]
    assert len(actors) == 1
    fixes = {fix["name"]: fix["state"] for fix in actors[0]["fixes"]}
    assert fixes["truncate-to-fit"] == "applied"


def test_an_actor_without_the_plan_ends_with_78(plan: Path, address: str) -> None:
    said, logs = drive(address, plan)
    assert "died" in said and "The actor never ran" in said
    errors = "".join(file.read_text(errors="replace") for file in logs.glob("worker-*.err"))
    assert "a Ray actor was started without the plan" in errors
    # Ray does not tell with which status.
    looked_up = [sys.executable, "-c", "import vllm_overlay.activate.rayactor"]
    assert subprocess.run(looked_up, env=environment(plan.parent), check=False).returncode == 78


def test_the_job_carries_the_plan_but_not_what_is_the_nodes_own() -> None:
    plan = Path("/plans/x/plan.json")
    body = {**PLAN.env, "NCCL_SOCKET_IFNAME": "eth0"}
    config = job_config(type(PLAN)(**{**vars(PLAN), "env": body}), plan)
    assert config == {
        "runtime_env": {"env_vars": {"VLLM_A_FIX": "1", PLAN_VARIABLE: "/plans/x/plan.json"}}
    }


def test_a_worker_node_becomes_ray_and_has_no_plan_of_its_own() -> None:
    seat = Seat(1, 2, "a", 6379, "10.0.0.2", "eth0", {"VLLM_HOST_IP": "10.0.0.2"}, ())
    command = ray_worker(seat)
    assert command[0].endswith("/bin/ray")
    assert command[1:] == (
        "start", "--node-ip-address=10.0.0.2", "--disable-usage-stats", "--address=a:6379",
        "--block",
    )  # fmt: skip
    found = raylet_environment({PLAN_VARIABLE: "/p", "NCCL_X": "1", JOB: "{}"}, seat)
    assert found == {"NCCL_X": "1", "VLLM_HOST_IP": "10.0.0.2"}


def test_serve_refuses_a_ray_recipe_where_ray_is_missing(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    arguments = ("serve", str(recipe), "--", "--distributed-executor-backend", "ray")
    done = cli(*arguments, home=tmp_path / "home")
    assert done.returncode == 78
    assert "Ray is not installed" in done.stderr and "vllm-overlay[ray]" in done.stderr
