"""A made-up vLLM behind HTTP: right in everything that the checks ask, but for named faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONTEXT = 512
BLOCK = 16
KV_TOKENS = 4096
ANSWER = ["The", " capital", " is", " Paris", "."]


@dataclass
class FakeServer:
    """``faults`` are names that ``_Handler`` and the methods here look for."""

    faults: set[str] = field(default_factory=set)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most: int = 0  # generations in flight at once
    generated: int = 0
    hits: int = 0
    seen: set[str] = field(default_factory=set)
    lock: Any = field(default_factory=threading.Lock)
    before_answer: Callable[[], None] = lambda: None
    url: str = ""

    def tokens(self, body: dict[str, Any]) -> list[str]:
        """Return the tokens of the answer to a request."""
        count = body.get("max_tokens", 16)
        if body.get("ignore_eos"):
            return [" story"] * (count - ("short" in self.faults))
        said = list(ANSWER)
        if "nonsense" in self.faults:
            said[3] = " Rome"
        if "random" in self.faults:
            said.append(f" {len(self.requests)}")
        if "stream" in self.faults and body.get("stream"):
            said.pop(0)
        if "silent" in self.faults:
            said = []
        return said[:count]

    def metrics(self) -> str:
        """Return the text of /metrics."""
        lines = [
            f"vllm:num_requests_running {self.running}",
            "vllm:num_requests_waiting 0",
            "vllm:kv_cache_usage_perc 0.0",
            "vllm:prompt_tokens_total 1",
            f"vllm:generation_tokens_total {self.generated}",
            'vllm:request_success_total{reason="stop"} 1',
            "vllm:prefix_cache_queries_total 1",
            f"vllm:prefix_cache_hits_total {self.hits}",
            f'vllm:cache_config_info{{block_size="{BLOCK}",enable_prefix_caching='
            f'"{"no prefix cache" not in self.faults}",kv_cache_size_tokens="{KV_TOKENS}"}} 1',
        ]
        if "metrics" in self.faults:
            del lines[1]
        return "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def do_GET(self) -> None:
        fake = self.fake
        if self.path == "/health":
            self.send(503 if "sick" in fake.faults else 200, "")
        elif self.path == "/metrics":
            self.send(200, fake.metrics())
        elif self.path == "/v1/models":
            listed = [] if "models" in fake.faults else [{"id": "demo", "max_model_len": CONTEXT}]
            self.send(200, json.dumps({"data": listed}))
        else:
            self.send(404, "")

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.requests.append({"path": self.path, **body})
        fake.headers.append(dict(self.headers))
        chat = self.path == "/v1/chat/completions"
        if chat and "no chat" in fake.faults:
            return self.send(400, '{"error": {"message": "no chat template"}}')
        text = body["messages"][0]["content"] if chat else body["prompt"]
        if len(text.split()) > CONTEXT:
            if "dies of length" in fake.faults:
                fake.faults.add("dead")
            return self.send(200 if "long" in fake.faults else 400, "{}")
        if "dead" in fake.faults:
            return self.send(500, "EngineDeadError")
        with fake.lock:
            fake.running += 1
            fake.most = max(fake.most, fake.running)
        try:
            fake.before_answer()
            self.stream(body, chat) if body.get("stream") else self.whole(body, text, chat)
        finally:
            with fake.lock:
                fake.running -= 1

    def whole(self, body: dict[str, Any], text: str, chat: bool) -> None:
        fake, tokens = self.fake, self.fake.tokens(body)
        if text in fake.seen and "prefix" not in fake.faults:
            fake.hits += len(text.split())
            if "prefix nonsense" in fake.faults:
                tokens = ["nonsense"]
        if len(text.split()) > BLOCK:
            fake.seen.add(text)
        choice: dict[str, Any] = {"finish_reason": "stop", "logprobs": self.logprobs(tokens, chat)}
        said = "".join(tokens)
        choice |= {"message": {"content": said}} if chat else {"text": said}
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(tokens)}
        self.send(200, json.dumps({"choices": [choice], "usage": usage}))

    def logprobs(self, tokens: list[str], chat: bool) -> dict[str, Any]:
        faults = self.fake.faults
        top = [("x" if "chosen" in faults else None, -0.1), ("y", -3.0)]
        if "unsorted" in faults:
            top.reverse()
        if "improbable" in faults:
            top = [(None, 0.5)]
        if "infinite" in faults:
            top = [(None, float("-inf"))]
        if "heavy" in faults:
            top = [(None, -0.1), ("y", -0.1)]
        value = next(value for name, value in top if name in (None, "x"))
        if not chat:
            tops = [{name or token: logprob for name, logprob in top} for token in tokens]
            return {
                "tokens": tokens,
                "token_logprobs": [value] * len(tokens),
                "top_logprobs": tops,
            }
        content = [
            {
                "token": token,
                "logprob": value,
                "top_logprobs": [{"token": n or token, "logprob": v} for n, v in top],
            }
            for token in tokens
        ]
        return {"content": content[1:] if "lost token" in faults else content}

    def stream(self, body: dict[str, Any], chat: bool) -> None:
        fake, tokens = self.fake, self.fake.tokens(body)
        self.send_response(200)
        self.end_headers()
        try:
            for token in tokens:
                fake.generated += 1
                part = {"delta": {"content": token}} if chat else {"text": token}
                self.event({"choices": [{**part, "finish_reason": None}]})
                if body.get("ignore_eos"):
                    threading.Event().wait(0.005)  # a model takes its time
        except OSError:  # the client has hung up
            if "deaf" in fake.faults:
                fake.generated += len(tokens)
            if "stuck" in fake.faults:
                fake.running += 1
            return
        final = {"delta": {}} if chat else {"text": ""}
        self.event({"choices": [{**final, "finish_reason": "stop"}]})
        self.event({"choices": [], "usage": {"completion_tokens": len(tokens)}})
        if "cut" not in fake.faults:
            self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def fake_server(*faults: str) -> Iterator[FakeServer]:
    """Serve on a free port of 127.0.0.1 until the block ends."""
    with serving_fake(FakeServer(set(faults))) as fake:
        yield fake


@contextmanager
def serving_fake(fake: FakeServer, port: int = 0) -> Iterator[FakeServer]:
    """Serve ``fake`` on 127.0.0.1 until the block ends."""
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
