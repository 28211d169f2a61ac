"""One known answer from the running model, asked once for all who want to know."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import IO

from vllm_overlay.client import NOT_SPOKEN, Client, UnreachableError, generation
from vllm_overlay.runs import Run

FRESH = 60.0  # seconds for which a good answer is believed
PATIENCE = 45.0  # seconds for an answer: the first one of a cold engine compiles
TOKENS = 64  # an answer ends sooner; a model that reasons first needs them
POLL = 0.05  # seconds between two looks at a lock that another process holds
ANYTHING = {"prompt": "Hello", "contains": ""}


@dataclass(frozen=True)
class Answer:
    """How the last generation went; ``finished`` in seconds of the machine's monotonic clock."""

    ok: bool
    detail: str
    finished: float


def known_answer(run: Run, fresh: float = FRESH, patience: float = PATIENCE) -> Answer:
    """Return an answer that is at most ``fresh`` seconds old, or ask the model for one.

    At most one generation is in flight, whatever number of processes ask: they wait for the
    one that asks, for ``patience`` seconds, and share its result, a bad one too. A bad answer
    is not kept for later callers. Raises OSError if the run's folder cannot be written.
    """
    asked = time.monotonic()
    path = run.folder / "runs" / f"{run.pid}-{run.start}.answer"
    with path.open("a+") as file:
        while not _lock(file):
            last = _last(file)
            if last and last.ok and last.finished > time.monotonic() - fresh:
                return last
            if time.monotonic() > asked + patience:
                said = f"another health check has been waiting for an answer for {patience:g} s"
                return Answer(False, said, time.monotonic())
            time.sleep(POLL)
        last = _last(file)
        if last and (last.finished > asked or (last.ok and last.finished > asked - fresh)):
            return last
        answer = ask(run, patience)
        file.truncate(0)
        json.dump(asdict(answer), file)
        return answer


def ask(run: Run, patience: float) -> Answer:
    """Ask the model, and say what came back if it is not the known answer."""
    expected: Mapping[str, str] = (run.expectations or [ANYTHING])[0]
    prompt, contains = expected["prompt"], expected["contains"]
    tokens = TOKENS if contains else 1
    client = Client(run.url, run.served_model, timeout=patience)
    try:
        reply = client.ask(prompt, chat=True, max_tokens=tokens)
        if reply.status in NOT_SPOKEN:
            reply = client.ask(prompt, chat=False, max_tokens=tokens)
        said = generation(reply)
    except (UnreachableError, ValueError) as error:
        return Answer(False, f"asked {prompt!r}: {error}", time.monotonic())
    ok = contains in said.text if contains else said.tokens > 0
    wanted = f"an answer with {contains!r}" if contains else "any answer"
    detail = f"asked {prompt!r}: {said.text!r}" + ("" if ok else f", expected {wanted}")
    return Answer(ok, detail, time.monotonic())


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _last(file: IO[str]) -> Answer | None:
    """Return the last result; None if there is none yet or it is being written."""
    file.seek(0)
    try:
        return Answer(**json.load(file))
    except (ValueError, TypeError):
        return None
