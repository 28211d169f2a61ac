"""The pure parts of the fix overlay-route: what the page and the gauges say."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_overlay import cluster
from vllm_overlay.activate.receipt import process_key
from vllm_overlay.errors import ConfigError
from vllm_overlay.receipts import read

FIX = Path(__file__).parents[2] / "fixes" / "overlay-route"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/webp,*/*;q=0.8"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("under_test", FIX / name)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def overlay() -> ModuleType:
    return load("overlay.py")


def receipt(role: str, pid: int = 1, state: str = "running", **fixes: str) -> dict[str, Any]:
    row = {"pid": pid, "role": role, "rank": None, "state": state}
    return {**row, "fixes": fixes, "notes": {}}


def fix(name: str, verdict: str = "apply", reasons: tuple[str, ...] = ()) -> dict[str, Any]:
    flag = {"flag": "VLLM_F", "value": "1", "value_from": "recipe"}
    return {"name": name, "verdict": verdict, "reasons": list(reasons), **flag}


def facts(fixes: list[dict[str, Any]], receipts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": 1,
        "digest": "d" * 64,
        "recipe": {"name": "demo", "variant": None},
        "model": "smollm2",
        "vllm": "0.32.0",
        "fixes": fixes,
        "receipts": receipts,
    }


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (BROWSER, True),
        ("*/*", False),
        ("", False),
        ("application/json", False),
        ("text/html", True),
        ("text/*", True),
        ("text/html;q=0.2, application/json", False),
        ("TEXT/HTML", True),
        ("text/html;q=broken, */*;q=0.1", False),
    ],
)
def test_a_browser_gets_html_and_a_script_json(
    overlay: ModuleType, accept: str, html: bool
) -> None:
    assert overlay.prefers_html(accept) is html


def test_a_fix_is_applied_in_a_role_if_every_process_that_imports_it_shows_it(
    overlay: ModuleType,
) -> None:
    receipts = [
        receipt("worker", 1, a="applied", b="waiting"),
        receipt("worker", 2, a="waiting", b="waiting"),
        receipt("worker", 4, state="starting"),
        receipt("api-server", 3, a="applied", b="applied"),
    ]
    found = overlay.applied_by_role(facts([fix("a"), fix("b"), fix("c", "off")], receipts))
    assert found == {
        ("a", "worker"): True,
        ("a", "api-server"): True,
        ("b", "api-server"): True,  # no worker imports it: nothing to say of workers
    }


@pytest.mark.parametrize(
    "second",
    [
        receipt("worker", 2, "without receipt"),
        receipt("worker", 2, "without plan"),
        receipt("worker", 2, other="applied"),
        receipt("worker", 2, a="failed"),
    ],
    ids=lambda row: f"{row['state']} {row['fixes']}",
)
def test_one_process_that_does_not_show_the_fix_is_enough_for_a_zero(
    overlay: ModuleType, second: dict[str, Any]
) -> None:
    first = receipt("worker", 1, a="applied")
    for receipts in ([first, second], [second, first]):
        shown = facts([fix("a")], receipts)
        assert overlay.applied_by_role(shown) == {("a", "worker"): False}
        assert '<h1 class="bad">' in overlay.as_html(shown)


class Page(HTMLParser):
    """Collects tags with their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_every_fact_and_loads_nothing(overlay: ModuleType) -> None:
    shown = facts(
        [fix("a"), fix("b", verdict="upstreamed", reasons=("0.33.0 carries it",))],
        [receipt("worker", 4711, a="applied")],
    )
    page = Page(overlay.as_html(shown))
    for text in ("demo", "smollm2", "0.32.0", "d" * 64, "VLLM_F=1", "4711", "✓ applied"):
        assert text in page.text
    assert "upstreamed" in page.text and "0.33.0 carries it" in page.text
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "base"}
    assert not any({"src", "href", "style"} & attrs.keys() for _, attrs in page.tags)
    assert "url(" not in page.text and "@import" not in page.text


def test_the_page_escapes_whatever_a_plan_or_receipt_holds(overlay: ModuleType) -> None:
    evil = "<script>alert('1')</script>\"&$x ${y} $$"
    bad = receipt(evil, 1, **{evil: "applied"})
    bad |= {"state": evil, "rank": evil, "notes": {evil: {evil: evil}}}
    bad_fix = fix(evil, reasons=(evil,)) | {"flag": evil, "value": evil, "value_from": evil}
    shown = facts([bad_fix, fix("z", verdict=evil)], [bad])
    shown |= dict.fromkeys(("digest", "model", "vllm"), evil)
    shown["recipe"] = {"name": evil, "variant": evil}
    html = overlay.as_html(shown)
    page = Page(html)
    assert "<script" not in html and "$verdict" not in html
    assert page.text.count(evil) == 17
    assert json.loads(overlay.as_json(shown)) == shown


def test_what_a_fix_noted_stands_beside_it_without_folders(
    overlay: ModuleType, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "triton: no CUDA library for sm_80 in /opt/venv/lib/kda: it has sm_90 (16/32 bit)"
    row = receipt("worker", 7, a="applied")
    row |= {"plan": plan_file.parent.name, "notes": {"a": {"kernel": why}}}
    monkeypatch.setattr(cluster, "status_rows", lambda home: {"processes": [row]})
    found = overlay.read_facts(plan_file)
    short = "triton: no CUDA library for sm_80 in kda: it has sm_90 (16/32 bit)"
    assert found["receipts"][0]["notes"] == {"a": {"kernel": short}}
    plan = facts([fix("a")], found["receipts"])
    assert f"✓ appliedkernel: {short}" in Page(overlay.as_html(plan)).text


def test_a_plan_without_fixes_and_a_server_without_receipts_have_a_page_too(
    overlay: ModuleType,
) -> None:
    assert "No fix is on" in overlay.as_html(facts([], []))
    page = overlay.as_html(facts([fix("a")], []))
    assert "no process" in page and '<h1 class="bad">' in page


def write_receipt(folder: Path, pid: int, start: int, role: str, **modules: str) -> None:
    record = {
        "schema": 1,
        "host": os.uname().nodename,
        "pid": pid,
        "start": start,
        "ppid": 1,
        "title": "vllm serve --api-key secret",
        "role": role,
        "rank": None,
        "plan": folder.name,
        "environment": "e",
        "updated": "2026-01-01T00:00:00Z",
        "fixes": [{"name": name, "modules": {"vllm.x": state}} for name, state in modules.items()],
    }
    (folder / "receipts").mkdir(exist_ok=True)
    (folder / "receipts" / f"{pid}-{start}.json").write_text(json.dumps(record))


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """The plan of a state folder with one fix on and one off."""
    file = tmp_path / "home" / "plans" / ("d" * 64) / "plan.json"
    file.parent.mkdir(parents=True)
    plan = facts([fix("a"), fix("b", "off")], []) | {
        "vllm": {"version": "0.32.0"},
        "served_model": "smollm2",
    }
    file.write_text(json.dumps(plan))
    return file


def test_a_receipt_that_cannot_be_read_is_named_without_its_folder(
    overlay: ModuleType, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is open to whoever reaches the server."""
    folder = plan_file.parent
    pid, start = process_key()
    path = folder / "receipts" / f"{pid}-{start}.json"
    path.mkdir(parents=True)  # EISDIR, in whose text Python names the path once more
    (problem,) = [receipt.problem for receipt in read(folder)]
    other = receipt("worker", 7, f"receipt {folder}/receipts/7-8.json is not its own: it names 9-9")
    rows = {"processes": [other | {"plan": folder.name}]}
    monkeypatch.setattr(cluster, "status_rows", lambda home: rows)
    found = overlay.read_facts(plan_file)
    states = {row["pid"]: row["state"] for row in found["receipts"]}
    assert states == {
        pid: f"receipt {path.name} cannot be read: IsADirectoryError: Is a directory",
        7: "receipt 7-8.json is not its own: it names 9-9",
    }
    assert str(path) in str(problem), "who may run `health` is told where it lies"
    assert str(folder) not in overlay.as_json(found) + overlay.as_html(found)


@pytest.mark.parametrize(
    "error",
    [OSError(5, "Input/output error"), ConfigError("a torn run record"), KeyError("plan"), None],
)
def test_what_cannot_be_read_is_a_zero_and_leaves_vllm_s_own_metrics(
    plan_file: Path, overlay: ModuleType, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    fastapi = pytest.importorskip("fastapi")
    prometheus = pytest.importorskip("prometheus_client")
    from fastapi.testclient import TestClient

    def rows(_: Path) -> None:
        if error:
            raise error

    monkeypatch.setattr(cluster, "status_rows", rows)
    package = ModuleType("vllm.entrypoints.serve.instrumentator")
    package.overlay = overlay  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setenv("VLLM_OVERLAY_PLAN", str(plan_file))
    hooks = load("hooks.py")
    stock = prometheus.CollectorRegistry()
    prometheus.Gauge("vllm_running", "vLLM's own.", registry=stock).set(3)
    metrics = ModuleType("metrics")
    metrics.attach_router = lambda app: None  # type: ignore[attr-defined]
    metrics.get_prometheus_registry = lambda: stock  # type: ignore[attr-defined]
    metrics.PrometheusResponse = fastapi.Response  # type: ignore[attr-defined]
    hooks.install(metrics)
    app = fastapi.FastAPI()
    metrics.attach_router(app)
    if error is None:
        plan_file.unlink()  # with the whole state folder, say
    answer = TestClient(app).get("/metrics")
    assert answer.status_code == 200
    assert "vllm_running 3.0" in answer.text
    assert 'vllm_overlay_fix_applied{fix="a",role="unknown"} 0.0' in answer.text
    assert 'fix="b"' not in answer.text
    assert f'vllm_overlay_plan_info{{digest="{"d" * 64}"' in answer.text


def test_the_facts_come_from_the_plan_and_the_live_processes_of_it(
    overlay: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plans" / ("d" * 64)
    folder.mkdir(parents=True)
    plan = facts([fix("a")], []) | {
        "vllm": {"version": "0.32.0", "path": "/secret"},
        "recipe": {"name": "demo", "variant": None, "file": "/secret"},
        "served_model": "smollm2",
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    write_receipt(folder, *process_key(), role="api-server", a="applied")
    write_receipt(folder, 77, 1, role="worker", a="applied")  # a dead process

    looks = iter([["without receipt", "running"], ["running", "without plan"]])

    def rows(home: Path) -> dict[str, Any]:
        assert home == tmp_path
        first, second = next(looks)
        seen = [receipt("worker", 5, first, a="applied"), receipt("other", 6, second)]
        seen[0] |= {"plan": "d" * 64, "title": "secret", "why": "secret"}
        seen[1] |= {"plan": None, "title": "secret"}
        return {"processes": [*seen, receipt("worker", 7) | {"plan": "another"}]}

    monkeypatch.setattr(cluster, "status_rows", rows)
    found = overlay.read_facts(folder / "plan.json")
    assert found == facts(
        [fix("a")],
        sorted(
            [
                receipt("worker", 5, a="applied"),
                receipt("other", 6, "without plan"),
                receipt("api-server", os.getpid(), a="applied"),
            ],
            key=lambda row: row["pid"],
        ),
    )
    assert "secret" not in overlay.as_json(found) + overlay.as_html(found)
    assert next(looks, None) is None, "a process without a receipt is looked at twice"
