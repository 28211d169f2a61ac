"""What the model says, and that it says the same however it is asked."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_overlay.answer import TOKENS
from vllm_overlay.client import Client, generation, text_of
from vllm_overlay.smoke.plugin import Ask

PROMPT = "Count from one to ten in words."
ALTERNATIVES = 5
ROUNDING = 1e-3  # of a logarithm of a probability that was summed in 32 bits


def fresh() -> dict[str, str]:
    """Return an option that keeps the prefix cache out: the same work is then done each time."""
    return {"cache_salt": uuid.uuid4().hex}


def check_known_answer(expected: Mapping[str, str], ask: Ask) -> None:
    said = ask(expected["prompt"], max_tokens=TOKENS).text
    assert expected["contains"] in said, f"expected {expected['contains']!r} in {said!r}"


def check_greedy_twice_the_same(ask: Ask) -> None:
    first, second = (ask(PROMPT, max_tokens=TOKENS, **fresh()).text for _ in range(2))
    assert first, "expected an answer, got none"
    assert first == second, f"first {first!r}, then {second!r}"


def check_streamed_is_not_streamed(client: Client, chat: bool) -> None:
    options = {"max_tokens": TOKENS, **fresh()}
    whole = generation(client.ask(PROMPT, chat=chat, **options))
    options |= fresh() | {"stream_options": {"include_usage": True}}
    with client.stream(PROMPT, chat=chat, **options) as events:
        text, finish, usage = read_stream(events)
    assert text == whole.text, f"streamed {text!r}, not streamed {whole.text!r}"
    assert finish == whole.finish, f"streamed ends by {finish}, not streamed by {whole.finish}"
    assert usage == whole.tokens, f"streamed {usage} tokens, not streamed {whole.tokens}"


def read_stream(events: Iterator[Any]) -> tuple[str, str | None, int]:
    """Return text, finish reason and number of tokens of a whole stream."""
    text, finish, tokens = "", None, 0
    for event in events:
        for choice in event["choices"]:
            text += text_of(choice["delta"]) if "delta" in choice else choice["text"]
            finish = choice.get("finish_reason") or finish
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return text, finish, tokens


def check_logprobs(ask: Ask, chat: bool) -> None:
    options: dict[str, Any] = {"logprobs": ALTERNATIVES}
    if chat:
        options = {"logprobs": True, "top_logprobs": ALTERNATIVES}
    said = ask(PROMPT, max_tokens=TOKENS, **options)
    tokens = read_logprobs(said.choice["logprobs"])
    assert len(tokens) == said.tokens, f"{said.tokens} tokens, but {len(tokens)} with logprobs"
    for place, (chosen, value, top) in enumerate(tokens):
        where = f"token {place} {chosen!r}: logprob {value}, top {top}"
        values = [logprob for _, logprob in top]
        assert all(math.isfinite(one) for one in [value, *values]), f"not finite: {where}"
        assert max([value, *values]) <= ROUNDING, f"a probability above one: {where}"
        assert values == sorted(values, reverse=True), f"not sorted: {where}"
        assert any(name == chosen and abs(one - value) <= ROUNDING for name, one in top), (
            f"the chosen token is not among the top: {where}"
        )
        assert sum(map(math.exp, values)) <= 1 + ROUNDING, f"more than one in all: {where}"


Logprobs = list[tuple[str, float, list[tuple[str, float]]]]


def read_logprobs(data: dict[str, Any]) -> Logprobs:
    """Return (token, logprob, alternatives) of each token, of either API."""
    if "content" in data:
        return [
            (
                one["token"],
                one["logprob"],
                [(t["token"], t["logprob"]) for t in one["top_logprobs"]],
            )
            for one in data["content"]
        ]
    tops = (sorted(top.items(), key=lambda pair: -pair[1]) for top in data["top_logprobs"])
    return list(zip(data["tokens"], data["token_logprobs"], tops, strict=True))
