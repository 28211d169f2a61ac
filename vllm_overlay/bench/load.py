"""The load on a server: vLLM's own ``bench serve``, and what /metrics shows meanwhile."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_overlay.client import Client, UnreachableError
from vllm_overlay.errors import FailedError
from vllm_overlay.launch import vllm_script
from vllm_overlay.plan import Plan
from vllm_overlay.smoke.metrics import Metrics

POLL = 0.2  # seconds between two looks at /metrics
RUNNING = "vllm:num_requests_running"
CAPACITY = ("vllm:cache_config_info", "kv_cache_size_tokens")
PASSED_ON = ("tokenizer-mode", "trust-remote-code")  # serve flags that the client has too


@dataclass(frozen=True)
class Load:
    """One load: ``streams`` clients at once, of ``prompts`` requests in all; lengths in tokens."""

    streams: int
    prompts: int
    input_len: int
    output_len: int
    seed: int


def run_load(url: str, plan: Plan, environ: Mapping[str, str], load: Load) -> dict[str, Any]:
    """Put the load on the server at ``url`` and return what came of it, JSON-ready.

    Rates are per second, times in milliseconds. ``environ`` is the client's environment. Raises
    FailedError where a request failed: fewer requests than asked for are no measurement.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        watch = Watch(url)
        with watch:
            done = subprocess.run(
                command(url, plan, load, result), env=client_environment(environ),
                stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
        try:
            found: dict[str, Any] = json.loads(result.read_text())
        except (OSError, ValueError):
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
            what = f"vllm bench serve ended with {done.returncode} and without a result"
            raise FailedError(what, found=said) from None
    completed = int(found["completed"])
    if done.returncode or completed != load.prompts or not found["output_throughput"]:
        rate = found["output_throughput"]
        raise FailedError(
            f"the load of {load.streams} streams failed",
            found=f"{completed} of {load.prompts} requests completed, {rate:g} tokens per second",
            remedy="the server's log says why",
        )
    return {
        "streams": load.streams,
        "prompts": load.prompts,
        "seconds": round(found["duration"], 3),
        "output_tokens_per_s": round(found["output_throughput"], 2),
        "total_tokens_per_s": round(found["total_token_throughput"], 2),
        "median_ttft_ms": round(found["median_ttft_ms"], 2),
        "median_itl_ms": round(found["median_itl_ms"], 2),
        "running_most": watch.most,
        "running_median": watch.median,
    }


def command(url: str, plan: Plan, load: Load, result: Path) -> list[str]:
    """Return the client's command line. Its model and tokenizer are the server's."""
    words = [
        vllm_script(), "bench", "serve", "--backend", "openai", "--base-url", url,
        "--model", plan.served_model, "--tokenizer", str(plan.serve.get("tokenizer", plan.model)),
        "--dataset-name", "random", "--random-input-len", load.input_len,
        "--random-output-len", load.output_len, "--ignore-eos", "--temperature", 0,
        "--num-prompts", load.prompts, "--max-concurrency", load.streams,
        "--num-warmups", load.streams, "--seed", load.seed, "--disable-tqdm",
        "--save-result", "--result-dir", result.parent, "--result-filename", result.name,
    ]  # fmt: skip
    for flag in PASSED_ON:
        value = plan.serve.get(flag)
        if value not in (None, False):
            words += [f"--{flag}"] if value is True else [f"--{flag}", value]
    if url.startswith("https:"):
        words.append("--insecure")
    return [str(word) for word in words]


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the client's environment: it takes the server's key from a variable of its own."""
    key = environ.get("VLLM_API_KEY")
    return {**environ, **({"OPENAI_API_KEY": key} if key else {})}


@dataclass
class Watch:
    """Looks at /metrics of ``url`` while its block runs. ``running`` is in requests at once."""

    url: str
    running: list[float] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(POLL):
            try:
                now = read_metrics(self.url).total(RUNNING)
            except (UnreachableError, LookupError):
                continue
            if now:  # between warm-up and load, and before and after, none is
                self.running.append(now)

    @property
    def most(self) -> int | None:
        """The most requests that ran at once, as far as it was seen."""
        return int(max(self.running)) if self.running else None

    @property
    def median(self) -> float | None:
        """The median of the requests that ran at once, while any did."""
        return statistics.median(self.running) if self.running else None


def read_metrics(url: str) -> Metrics:
    """Return what /metrics shows now. Raises UnreachableError."""
    return Metrics.parse(Client(url, "").get("/metrics").text)


def kv_capacity(url: str) -> int | None:
    """Return how many tokens the KV cache of all engines holds; None where vLLM does not say.

    Raises FailedError without an answer.
    """
    name, label = CAPACITY
    try:
        samples = read_metrics(url).named(name)
    except UnreachableError as error:
        raise FailedError("the server does not show its metrics", found=error) from None
    found = [sample.labels.get(label, "") for sample in samples]
    return sum(map(int, found)) if found and all(map(str.isdigit, found)) else None
