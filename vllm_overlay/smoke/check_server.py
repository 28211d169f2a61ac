"""The server itself: is it up, what does it list, can it be watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_overlay.client import Client
from vllm_overlay.smoke.metrics import Metrics

METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
)


def check_health(server: Client) -> None:
    reply = server.get("/health")
    assert reply.status == 200, f"expected 200, got {reply.status}"


def check_models(model: dict[str, Any]) -> None:
    assert model["max_model_len"] > 0, f"expected a context length, got {model['max_model_len']}"


def check_metrics(metrics: Callable[[], Metrics]) -> None:
    found = metrics()
    missing = [name for name in METRICS if not found.named(name)]
    assert not missing, f"/metrics lacks {', '.join(missing)}"
