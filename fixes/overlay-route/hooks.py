"""Adds GET /overlay to vLLM's API server, and the overlay's gauges to its /metrics."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from vllm.entrypoints.serve.instrumentator import overlay

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}


class Gauges:
    """A Prometheus collector that reads the receipts anew at each scrape."""

    def __init__(self, plan_file: Path) -> None:
        self.plan_file = plan_file
        self.plan = json.loads(plan_file.read_bytes())

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "vllm_overlay_plan_info",
            "The plan that this server runs.",
            labels=["digest", "recipe", "vllm"],
        )
        plan = self.plan
        info.add_metric([plan["digest"], plan["recipe"]["name"], plan["vllm"]["version"]], 1)
        yield info
        applied = GaugeMetricFamily(
            "vllm_overlay_fix_applied",
            "1: every process of the role that imports what the fix changes shows it applied.",
            labels=["fix", "role"],
        )
        for names, whole in sorted(overlay.gauge_values(self.plan_file, plan).items()):
            applied.add_metric(names, whole)
        yield applied


def show(request: Request, format: Literal["json", "html"] | None = None) -> Response:
    """What this server's plan is, and which process has applied it. HTML for a browser."""
    facts = overlay.read_facts(plan_file())
    if format == "html" or (
        format is None and overlay.prefers_html(request.headers.get("accept", ""))
    ):
        return Response(overlay.as_html(facts), media_type="text/html", headers=HEADERS)
    return Response(overlay.as_json(facts), media_type="application/json", headers=HEADERS)


def plan_file() -> Path:
    return Path(os.environ["VLLM_OVERLAY_PLAN"])


def install(module: ModuleType) -> dict[str, Any]:
    """Wrap `attach_router(app)`, which adds /metrics, and return what was put there.

    With several API servers, vLLM's /metrics makes a new registry at each scrape, which no
    collector can join. So our /metrics comes first, asks vLLM for its registry, and appends
    the gauges. Handlers are plain functions: FastAPI runs them off the event loop.
    """
    original = module.attach_router
    if hasattr(original, "overlay_routes"):
        return {"attach_router": original}
    gauges = CollectorRegistry()
    gauges.register(Gauges(plan_file()))

    def metrics() -> Response:
        stock = generate_latest(module.get_prometheus_registry())
        return module.PrometheusResponse(stock + generate_latest(gauges))  # type: ignore[no-any-return]

    @functools.wraps(original)
    def attach_router(app: FastAPI) -> None:
        app.add_api_route("/overlay", show, methods=["GET"], response_class=Response)
        for path in ("/metrics", "/metrics/"):
            app.add_api_route(path, metrics, methods=["GET"], include_in_schema=False)
        original(app)

    attach_router.overlay_routes = True  # type: ignore[attr-defined]
    module.attach_router = attach_router
    return {"attach_router": attach_router}
