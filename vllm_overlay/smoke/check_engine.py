"""How the engine behaves under load, abuse and repetition."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from vllm_overlay.client import Client, generation
from vllm_overlay.smoke.metrics import Metrics
from vllm_overlay.smoke.plugin import Ask

TOPICS = ("rain", "bread", "the moon", "a bridge", "music", "salt", "trains", "winter")
TOKENS = 16
LONG = 8192  # tokens of a request that is cancelled: longer than anyone waits here
PATIENCE = 30.0  # seconds until a condition must hold
POLL = 0.1
WORD = " one two three four five six seven eight nine ten"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}"
        time.sleep(POLL)


def check_eight_at_once(client: Client, chat: bool) -> None:
    def one(topic: str) -> int:
        prompt = f"Write one sentence about {topic}."
        reply = client.ask(prompt, chat=chat, max_tokens=TOKENS, ignore_eos=True)
        return generation(reply).tokens

    with ThreadPoolExecutor(len(TOPICS)) as pool:
        tokens = dict(zip(TOPICS, pool.map(one, TOPICS), strict=True))
    assert set(tokens.values()) == {TOKENS}, f"expected {TOKENS} tokens each, got {tokens}"


def check_cancelled_request_frees_its_slot(
    client: Client, chat: bool, model: dict[str, Any], metrics: Callable[[], Metrics]
) -> None:
    running, generated = "vllm:num_requests_running", "vllm:generation_tokens"
    wait_until(lambda: metrics().total(running) == 0, "the engine has no request of others")
    before = metrics().total(generated)
    tokens = min(LONG, model["max_model_len"] // 2)
    with client.stream("Tell a story.", chat=chat, max_tokens=tokens, ignore_eos=True) as events:
        next(events)
        wait_until(lambda: metrics().total(running) == 1, "one request is running")
    wait_until(lambda: metrics().total(running) == 0, "no request is running after hanging up")
    made = metrics().total(generated) - before
    assert made < tokens, f"all {tokens} tokens were generated for a client that had hung up"


def check_too_long_prompt_is_refused(
    client: Client, chat: bool, model: dict[str, Any], ask: Ask
) -> None:
    prompt = WORD * (model["max_model_len"] // 10 + 1)
    reply = client.ask(prompt, chat=chat, max_tokens=1)
    assert reply.status == 400, f"expected 400, got {reply.status}"
    assert ask("Hello", max_tokens=1).tokens == 1, "the engine does not answer any more"


def check_prefix_cache(ask: Ask, model: dict[str, Any], metrics: Callable[[], Metrics]) -> None:
    config = metrics().named("vllm:cache_config_info")[0].labels
    if config["enable_prefix_caching"] != "True":
        pytest.skip("prefix caching is off for this model")
    # Hybrid models share a prefix in larger steps than a block.
    steps = [config.get(key, "") for key in ("block_size", "cache_hit_alignment_tokens")]
    step = max(int(value) for value in steps if value.isdigit())
    words = (2 * step) // 10 + 1
    if 4 * step + TOKENS > model["max_model_len"]:
        pytest.skip(f"the context is too short for a shared prefix of {step} tokens")
    options = {"max_tokens": TOKENS, "cache_salt": uuid.uuid4().hex}
    prompt = f"{WORD * words}\nWhat is the capital of France?"
    first = ask(prompt, **options)
    assert first.prompt_tokens > step, f"the prompt has {first.prompt_tokens} tokens, not {step}"
    before = metrics().total("vllm:prefix_cache_hits")
    second = ask(prompt, **options)
    hits = metrics().total("vllm:prefix_cache_hits") - before
    assert hits >= step, f"{hits:g} tokens from the prefix cache, expected at least {step}"
    assert second.text == first.text, f"first {first.text!r}, from the cache {second.text!r}"
