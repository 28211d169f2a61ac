"""The pure parts of the fix overlay-route: what the page and the gauges say."""

from __future__ import annotations

import importlib.util
import json
import os
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_overlay.activate.receipt import process_key

FIX = Path(__file__).parents[2] / "fixes" / "overlay-route"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/webp,*/*;q=0.8"


@pytest.fixture(scope="module")
def overlay() -> ModuleType:
    spec = importlib.util.spec_from_file_location("overlay_under_test", FIX / "overlay.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def receipt(role: str, pid: int = 1, state: str = "running", **fixes: str) -> dict[str, Any]:
    return {"pid": pid, "role": role, "rank": None, "state": state, "fixes": fixes}


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
    bad |= {"state": evil, "rank": evil}
    bad_fix = fix(evil, reasons=(evil,)) | {"flag": evil, "value": evil, "value_from": evil}
    shown = facts([bad_fix, fix("z", verdict=evil)], [bad])
    shown |= dict.fromkeys(("digest", "model", "vllm"), evil)
    shown["recipe"] = {"name": evil, "variant": evil}
    html = overlay.as_html(shown)
    page = Page(html)
    assert "<script" not in html and "$verdict" not in html
    assert page.text.count(evil) == 15
    assert json.loads(overlay.as_json(shown)) == shown


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

    monkeypatch.setattr(overlay, "status_rows", rows)
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
