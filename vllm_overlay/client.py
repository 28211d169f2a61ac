"""Asks a vLLM server over HTTP. Standard library only: a health check must start quickly."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

SHOWN = 600  # characters of a question or an answer in a message
NOT_SPOKEN = frozenset({400, 404, 405, 501})  # what /v1/chat/completions says without a template


class UnreachableError(Exception):
    """The server gave no answer at all: refused, reset, or too slow."""


@dataclass(frozen=True)
class Reply:
    """An HTTP answer, whatever its status."""

    status: int
    text: str

    def json(self) -> Any:
        """Return the body as JSON; raises ValueError if it is none."""
        return json.loads(self.text)


@dataclass
class Exchange:
    """What was asked and what came back, for the message of a failed check."""

    asked: str
    came: str = "nothing"

    def __str__(self) -> str:
        return f"asked: {self.asked}\ncame back: {self.came}"


@dataclass(frozen=True)
class Generation:
    """A generated answer. ``text`` holds the reasoning too, if the server splits it off."""

    text: str
    finish: str | None
    prompt_tokens: int
    tokens: int
    choice: dict[str, Any]


@dataclass
class Client:
    """One server. Keeps every exchange in ``exchanges`` until the owner clears it.

    The API key comes from VLLM_API_KEY, as for vLLM itself. Certificates are not checked: the
    server is on this node, or was named by the user.
    """

    url: str
    model: str
    timeout: float = 60.0  # seconds for each read
    exchanges: list[Exchange] = field(default_factory=list)

    def get(self, path: str) -> Reply:
        """Return the answer to GET; raises UnreachableError."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        """Return the answer to POST; raises UnreachableError."""
        return self._ask("POST", path, body)

    def ask(self, prompt: str, *, chat: bool, **options: Any) -> Reply:
        """Ask for one greedy generation; ``options`` are those of the request."""
        path, body = self.request(prompt, chat=chat, **options)
        return self.post(path, body)

    def request(self, prompt: str, *, chat: bool, **options: Any) -> tuple[str, dict[str, Any]]:
        """Return path and body of a greedy generation."""
        body: dict[str, Any] = {"model": self.model, "temperature": 0, **options}
        if chat:
            return "/v1/chat/completions", body | {
                "messages": [{"role": "user", "content": prompt}]
            }
        return "/v1/completions", body | {"prompt": prompt}

    @contextmanager
    def stream(self, prompt: str, *, chat: bool, **options: Any) -> Iterator[Iterator[Any]]:
        """Yield the events of a streamed generation; leaving the block hangs up.

        Raises UnreachableError, also for a status other than 200 and for a stream without its end.
        """
        path, body = self.request(prompt, chat=chat, stream=True, **options)
        exchange = self._note("POST", path, body)
        try:
            with self._open("POST", path, body) as response:
                exchange.came = f"{response.status}, a stream"
                yield self._events(response, exchange)
        except urllib.error.HTTPError as error:
            exchange.came = f"{error.code} {_short(error.read().decode(errors='replace'))}"
            raise UnreachableError(f"{path} answered {exchange.came}") from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(path, exchange, error) from error

    def _events(self, response: http.client.HTTPResponse, exchange: Exchange) -> Iterator[Any]:
        for line in response:
            if line.startswith(b"data: "):
                data = line[len(b"data: ") :].decode(errors="replace").strip()
                exchange.came += f"\n  {_short(data)}"
                if data == "[DONE]":
                    return
                yield json.loads(data)
        raise UnreachableError(f"the stream of {self.url} ended without [DONE]")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Reply:
        exchange = self._note(method, path, body)
        try:
            with self._open(method, path, body) as response:
                reply = Reply(response.status, response.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            reply = Reply(error.code, error.read().decode(errors="replace"))
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(path, exchange, error) from error
        exchange.came = f"{reply.status} {_short(reply.text)}"
        return reply

    def _open(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # a proxy has no business between us and the node
            urllib.request.HTTPSHandler(context=context),
        )
        return opener.open(request, timeout=self.timeout)

    def _note(self, method: str, path: str, body: dict[str, Any] | None) -> Exchange:
        said = "" if body is None else f" {_short(json.dumps(body, ensure_ascii=False))}"
        exchange = Exchange(f"{method} {self.url}{path}{said}")
        self.exchanges.append(exchange)
        return exchange

    def _unreachable(self, path: str, exchange: Exchange, error: Exception) -> UnreachableError:
        if isinstance(error, TimeoutError) or isinstance(
            getattr(error, "reason", None), TimeoutError
        ):
            said = f"no answer within {self.timeout:g} s"
        else:
            said = f"no answer: {getattr(error, 'reason', None) or error}"
        exchange.came = said
        return UnreachableError(f"{self.url}{path}: {said}")


def generation(reply: Reply) -> Generation:
    """Read the answer to a generation request; raises ValueError if it is none."""
    if reply.status != 200:
        raise ValueError(f"status {reply.status}: {_short(reply.text)}")
    body = reply.json()
    try:
        choice, usage = body["choices"][0], body["usage"]
        text = text_of(choice["message"]) if "message" in choice else choice["text"]
        counts = usage["prompt_tokens"], usage["completion_tokens"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not a generation: {_short(reply.text)}") from error
    return Generation(text, choice.get("finish_reason"), *counts, choice)


def text_of(message: dict[str, Any]) -> str:
    """Return the text of a chat message or of a streamed part: reasoning, then content."""
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return reasoning + (message.get("content") or "")


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"
