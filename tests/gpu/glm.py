"""What the real engine does with a small random GLM-5.3-Flash, for test_glm_engine.py.

``python -m tests.gpu.glm '{"heads": 4, "runs": ["many"]}' FILE`` writes what it saw to FILE. A
``mutant`` leaves the commit out ("uncommitted") or commits one token too few ("short").
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM

from bench.random_glm import Engine, greedy, kv_tokens, prompts, start
from vllm_overlay.activate import current


def counters(mutant: str) -> dict[str, Any]:
    """Count verifies and commits, and break the commit if asked to; empty without the fix."""
    try:
        from vllm.models.glm5next.common import (
            recoverssm,
            recoverssm_commit,
            recoverssm_deferred,
            recoverssm_metadata,
        )

        from vllm_overlay.kda import folds
    except ImportError:
        return {}
    counted: dict[str, Any] = {"verifies": 0, "commits": 0, "committed": 0}
    counted["deferred"] = recoverssm.is_deferred()
    metadata: type = recoverssm_metadata.Glm5NextRecoverSSMMetadata
    if counted["deferred"]:
        metadata = recoverssm_deferred.Glm5NextDeferredMetadata
    table = recoverssm_commit.CommitTable
    verify, compact = metadata.verify, table.compact
    plan_commits = recoverssm_metadata.plan_commits

    def counted_verify(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        counted["verifies"] += 1
        return verify(self, *args, **kwargs)

    def counted_compact(self: Any, rows: int) -> None:
        counted["commits"] += 1
        counted["committed"] = self.contexts[0].plan[:rows, 0].sum() + counted["committed"]
        if mutant != "uncommitted":
            compact(self, rows)

    def short_plan(contexts: Any, accepted: torch.Tensor, rows: Any) -> None:
        plan_commits(contexts, (accepted - 1).clamp(min=1), rows)

    metadata.verify = counted_verify
    table.compact = counted_compact
    if mutant == "uncommitted":
        table.fold = lambda self, *args: None
        folds.Ledger.settle = lambda self, *args, **kwargs: None
    if mutant == "short":
        recoverssm_metadata.plan_commits = short_plan
    return counted


def tokens_of(answers: Sequence[Any]) -> list[list[int]]:
    return [list(answer.outputs[0].token_ids) for answer in answers]


def one(llm: LLM) -> Any:
    return [tokens_of(greedy(llm, prompts(1, 100, seed), 96)) for seed in (1, 2)]


def many(llm: LLM) -> Any:
    return tokens_of(greedy(llm, prompts(32, 100, 3), 96))


def long(llm: LLM) -> Any:
    """Far enough to cross several block ends."""
    return tokens_of(greedy(llm, prompts(3, 300, 4), 1500))


def again(llm: LLM) -> Any:
    """The same prompts twice: the second time from the prefix cache."""
    asked = prompts(4, 1500, 5)
    first, second = greedy(llm, asked, 64), greedy(llm, asked, 64)
    cached = [answer.num_cached_tokens for answer in second]
    return {"first": tokens_of(first), "second": tokens_of(second), "cached": cached}


def check(llm: LLM) -> float:
    return distance(llm, prompts(16, 100, 7), 96)


def grown(llm: LLM) -> float:
    """Requests that outgrow a small cache, so that some are preempted and resumed."""
    return distance(llm, prompts(24, 100, 8), 900)


def distance(llm: LLM, asked: list[dict[str, list[int]]], tokens: int) -> float:
    """Mean distance between a token's log-probability as decoded and as one prefill sees it.

    A right engine's is rounding, a few hundredths; a state that is a token off gives tenths.
    """
    answers = greedy(llm, asked, tokens, logprobs=0)
    whole = [
        {"prompt_token_ids": prompt["prompt_token_ids"] + answer}
        for prompt, answer in zip(asked, tokens_of(answers), strict=True)
    ]
    prefills = greedy(llm, whole, 1, prompt_logprobs=0)
    found = []
    for answer, prefill in zip(answers, prefills, strict=True):
        output = answer.outputs[0]
        logs = prefill.prompt_logprobs[-len(output.token_ids) :]
        for token, decoded, once in zip(output.token_ids, output.logprobs, logs, strict=True):
            found.append(abs(decoded[token].logprob - once[token].logprob))
    return sum(found) / len(found)


def metrics(llm: LLM) -> dict[str, float]:
    wanted = ("num_drafts", "num_accepted_tokens", "num_preemptions", "prefix_cache_hits")
    return {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if metric.name.endswith(wanted) and hasattr(metric, "value")
    }


RUNS: dict[str, Callable[[LLM], Any]] = {
    "one": one,
    "many": many,
    "long": long,
    "again": again,
    "check": check,
    "grown": grown,
}


def main(mutant: str, runs: Sequence[str], engine: Engine, file: Path) -> None:
    counted = counters(mutant)
    llm = start(engine)
    found: dict[str, Any] = {name: RUNS[name](llm) for name in runs}
    if counted:
        counted["committed"] = int(counted["committed"])
    found |= {"counted": counted, "metrics": metrics(llm)}
    found["kv_tokens"] = kv_tokens(llm)
    plan = current()
    found["notes"] = plan.notes if plan else {}
    found["block"] = llm.llm_engine.vllm_config.cache_config.mamba_block_size
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    mutant, runs = given.pop("mutant", ""), given.pop("runs", ["one", "many", "check"])
    main(mutant, runs, Engine(**given), Path(sys.argv[2]))
