"""The fix truncate-to-fit, seen by a client: a prompt that is cut leaves room for an answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

LONG = "All work and no play makes Jack a dull boy. " * 400  # over 4000 tokens


def chat(url: str, **extra: Any) -> httpx.Response:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]
    body = {"model": model["id"], "messages": [{"role": "user", "content": LONG}], **extra}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def respond(url: str, **extra: Any) -> httpx.Response:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]
    body = {"model": model["id"], "input": LONG, **extra}
    return httpx.post(f"{url}/v1/responses", json=body, timeout=120)


def context(url: str) -> int:
    length: int = httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]
    return length


def test_a_chat_that_is_cut_to_fit_is_answered(server: Any) -> None:
    answer = chat(server.url, truncate_prompt_tokens=-1)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == context(server.url) - 1
    assert usage["completion_tokens"] == 1


def test_a_response_that_is_cut_to_fit_is_answered(server: Any) -> None:
    answer = respond(server.url, truncation="auto")
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["input_tokens"] == context(server.url) - 1
    assert usage["output_tokens"] == 1


@pytest.mark.parametrize("send", [chat, respond])
def test_a_prompt_that_may_not_be_cut_is_still_refused(server: Any, send: Any) -> None:
    answer = send(server.url)
    assert answer.status_code == 400
    assert "maximum context length" in answer.text


def test_a_client_that_asks_for_no_token_at_all_is_still_refused(server: Any) -> None:
    answer = chat(server.url, truncate_prompt_tokens=-1, max_tokens=0)
    assert answer.status_code == 400
    assert "max_tokens must be at least 1" in answer.text


def test_with_its_flag_off_vllm_0_32_refuses_both(server_without_fixes: Any) -> None:
    url = server_without_fixes.url
    length = context(url)
    for answer, reason in (
        (chat(url, truncate_prompt_tokens=-1), "max_tokens must be at least 1, got 0"),
        (respond(url, truncation="auto"), f"prompt length {length} exceeds the max_model_len"),
    ):
        assert answer.status_code == 400
        assert reason in answer.text
