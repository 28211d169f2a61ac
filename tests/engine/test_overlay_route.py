"""The fix overlay-route on a real server: the page, the JSON and the gauges."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
# vLLM's own code builds the routes, in a process that the plan patches; then once more, reloaded.
BUILD_ROUTES = """
import importlib
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve import instrumentator
from vllm.entrypoints.serve.instrumentator import metrics

for _ in range(2):
    app = FastAPI()
    instrumentator.register_instrumentator_api_routers(app)
    client = TestClient(app)
    assert client.get("/overlay").status_code == 200
    text = client.get("/metrics").text
    assert text.count("# TYPE vllm_overlay_fix_applied") == 1, text
    importlib.reload(metrics)
print(text)
"""
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def plan_of(server: Any) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(Path(server.plan).read_text())
    return plan


def samples(text: str, name: str) -> dict[frozenset[tuple[str, str]], float]:
    """Return the samples of one metric in Prometheus text: {labels: value}."""
    found = {}
    for match in filter(None, map(SAMPLE.match, text.splitlines())):
        if match[1] == name:
            found[frozenset(re.findall(r'(\w+)="([^"]*)"', match[2]))] = float(match[3])
    return found


def test_a_script_gets_plan_fixes_and_receipts_as_json(server: Any) -> None:
    plan = plan_of(server)
    answer = httpx.get(f"{server.url}/overlay")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/json")
    shown = answer.json()
    assert shown["digest"] == plan["digest"]
    assert {(fix["name"], fix["verdict"]) for fix in shown["fixes"]} == {
        (fix["name"], fix["verdict"]) for fix in plan["fixes"]
    }
    roles = {receipt["role"] for receipt in shown["receipts"]}
    assert roles >= {"api-server", "engine-core", "worker"}
    assert server.pid in {receipt["pid"] for receipt in shown["receipts"]}
    assert httpx.get(f"{server.url}/overlay?format=json", headers={"Accept": BROWSER}).json()


def test_a_browser_gets_a_page(server: Any) -> None:
    answer = httpx.get(f"{server.url}/overlay", headers={"Accept": BROWSER})
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert plan_of(server)["digest"] in answer.text
    assert "Every process shows its fixes" in answer.text
    assert httpx.get(f"{server.url}/overlay?format=html").text.startswith("<!doctype html>")


def test_an_unknown_format_is_refused(server: Any) -> None:
    assert httpx.get(f"{server.url}/overlay?format=xml").status_code == 400


def test_the_gauges_say_what_the_receipts_say(server: Any) -> None:
    plan = plan_of(server)
    for path in ("/metrics", "/metrics/"):
        text = httpx.get(f"{server.url}{path}").text
        info = samples(text, "vllm_overlay_plan_info")
        assert list(info.values()) == [1.0]
        assert {("digest", plan["digest"]), ("vllm", plan["vllm"]["version"])} <= set(*info)
        applied = samples(text, "vllm_overlay_fix_applied")
        assert applied[frozenset({("fix", "overlay-route"), ("role", "api-server")})] == 1.0
        assert applied[frozenset({("fix", "truncate-to-fit"), ("role", "api-server")})] == 1.0
        assert set(applied.values()) == {1.0}


def test_vllms_own_metrics_are_all_still_there(server: Any, server_without_fixes: Any) -> None:
    def names(url: str) -> set[str]:
        httpx.get(f"{url}/v1/models")  # some metrics appear with the first request
        return set(re.findall(r"^# TYPE (\S+)", httpx.get(f"{url}/metrics").text, re.M))

    ours = {"vllm_overlay_plan_info", "vllm_overlay_fix_applied"}
    assert names(server.url) - names(server_without_fixes.url) == ours
    assert names(server_without_fixes.url) <= names(server.url)


def test_with_its_flag_off_the_route_and_the_gauges_are_gone(server_without_fixes: Any) -> None:
    assert httpx.get(f"{server_without_fixes.url}/overlay").status_code == 404
    assert "vllm_overlay" not in httpx.get(f"{server_without_fixes.url}/metrics").text


@pytest.mark.parametrize("api_servers", [1, 2])
def test_the_gauges_are_there_with_one_api_server_and_with_several(
    server: Any, tmp_path: Path, api_servers: int
) -> None:
    plan = tmp_path / "plans" / server.plan.parent.name / "plan.json"
    plan.parent.mkdir(parents=True)
    shutil.copy(server.plan, plan)
    shutil.copytree(server.home / "store", tmp_path / "store")
    environment = os.environ | plan_of(server)["env"] | {"VLLM_OVERLAY_PLAN": str(plan)}
    if api_servers > 1:  # as vLLM sets it for its API servers, which then share their metrics
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path / "shared")
        (tmp_path / "shared").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD_ROUTES], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    digest = plan_of(server)["digest"]
    assert f'vllm_overlay_plan_info{{digest="{digest}",recipe="demo"' in done.stdout
    assert 'vllm_overlay_fix_applied{fix="overlay-route",role="other"} 1.0' in done.stdout
    assert 'http_requests_total{handler="/overlay"' in done.stdout
    assert any(Path(environment.get("PROMETHEUS_MULTIPROC_DIR", os.devnull)).glob("*.db")) == (
        api_servers > 1
    )
