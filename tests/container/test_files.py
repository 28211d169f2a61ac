"""The compose files, and the builds that are refused: nothing is started."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.compose import LOCAL_BASE, ROOT, Node, environment, has_image, node


@pytest.fixture
def files(tmp_path: Path) -> Node:
    return node(tmp_path, "vllm-overlay-test-files", "vllm-overlay:none", tmp_path)


def service(files: Node, **env: str) -> dict[str, Any]:
    done = files.compose("config", "--format", "json", **env)
    found: dict[str, Any] = json.loads(done.stdout)["services"]["serve"]
    return found


def test_a_gpu_is_reserved_unless_the_cpu_file_is_given(files: Node) -> None:
    gpu = service(Node(files.checkout, files.env, cpu=False), RECIPE="demo")
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"], device["count"]) == ("nvidia", ["gpu"], -1)
    assert "deploy" not in service(files, RECIPE="demo")


@pytest.mark.parametrize("env", [{}, {"RECIPE": ""}])
def test_no_recipe_is_refused_by_compose(files: Node, env: dict[str, str]) -> None:
    done = files.compose("config", check=False, **env)
    assert done.returncode != 0
    assert "RECIPE" in done.stderr
    assert "name a recipe, for example RECIPE=demo" in done.stderr


def test_values_pass_through_and_have_no_default_here(files: Node) -> None:
    unset = service(files, RECIPE="demo")["environment"]
    assert {name for name, value in unset.items() if value is not None} == {"RECIPE"}
    given = service(files, RECIPE="demo", VARIANT="tp2", VLLM_API_KEY="k")["environment"]
    assert (given["VARIANT"], given["VLLM_API_KEY"]) == ("tp2", "k")


def test_the_env_file_reaches_compose_and_the_container(files: Node) -> None:
    env = files.checkout / "compose" / ".env"
    env.write_text("RECIPE=second\nVLLM_OVERLAY_ROUTE=0\nVLLM_API_KEY=k\n")
    found = service(files)["environment"]
    assert found["RECIPE"] == "second"
    assert found["VLLM_OVERLAY_ROUTE"] == "0"
    assert found["VLLM_API_KEY"] == "k"
    assert service(files, RECIPE="demo")["environment"]["RECIPE"] == "demo"


def cluster(files: Node, **env: str) -> dict[str, Any]:
    return service(Node(files.checkout, files.env, more=("cluster.yaml",)), RECIPE="demo", **env)


@pytest.mark.parametrize("missing", ["NODE_RANK", "HEAD_ADDR"])
def test_a_node_must_be_told_its_place(files: Node, missing: str) -> None:
    env = {"NODE_RANK": "0", "HEAD_ADDR": "a", "RECIPE": "demo"}
    node = Node(files.checkout, files.env, more=("cluster.yaml",))
    done = node.compose("config", check=False, **{**env, missing: ""})
    assert done.returncode != 0 and missing in done.stderr
    found = cluster(files, NODE_RANK="1", HEAD_ADDR="a")
    assert (found["network_mode"], found["restart"]) == ("host", "on-failure")
    assert not found.get("ports")
    assert found["environment"]["NODE_RANK"] == "1"
    assert cluster(files, NODE_RANK="1", HEAD_ADDR="a", RESTART="no")["restart"] == "no"


def build(*arguments: str) -> subprocess.CompletedProcess[str]:
    base = ["--build-arg", f"CUDA_BASE={LOCAL_BASE}"] if has_image(LOCAL_BASE) else []
    return subprocess.run(
        ["docker", "build", "--progress=plain", *base, *arguments, str(ROOT)],
        env=environment({}),
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_unknown_kind_of_build_is_refused_before_anything_is_installed() -> None:
    done = build("--build-arg", "VLLM_BUILD=sorce")
    assert done.returncode != 0
    assert "VLLM_BUILD is 'wheel' or 'source'; found 'sorce'" in done.stderr
    assert "Collecting" not in done.stderr


def test_a_vllm_without_a_lock_is_refused() -> None:
    done = build("--build-arg", "VLLM_VERSION=0.0.1")
    assert done.returncode != 0
    assert "requirements-cuda-0.0.1.lock" in done.stderr
