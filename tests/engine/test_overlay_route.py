"""The fix overlay-route on a real server: the page, the JSON and the gauges."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx

SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
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
        return set(re.findall(r"^# TYPE (\S+)", httpx.get(f"{url}/metrics").text, re.M))

    ours = {"vllm_overlay_plan_info", "vllm_overlay_fix_applied"}
    assert names(server.url) - names(server_without_fixes.url) == ours
    assert names(server_without_fixes.url) <= names(server.url)


def test_with_its_flag_off_the_route_and_the_gauges_are_gone(server_without_fixes: Any) -> None:
    assert httpx.get(f"{server_without_fixes.url}/overlay").status_code == 404
    assert "vllm_overlay" not in httpx.get(f"{server_without_fixes.url}/metrics").text
