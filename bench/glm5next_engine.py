"""Tokens a second of a small random GLM-5.3-Flash in vLLM's engine: stock, exact and fast.

``python -m bench.glm5next_engine``: the engines of a wave start beside each other and are then
timed round by round, each alone on the GPU: a machine whose speed changes slows all of them. Eight
layers of real width (six KDA), MTP with seven drafts, synthetic acceptance 4.0, 128 tokens in and
256 out, prefix caching off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from vllm_overlay.bench.record import RESULTS, save

FIX = "glm5next-recoverssm"
SIDES = {"off": "-", "on": FIX, "fast": f"{FIX}=fast"}
OUT = 256
ROUNDS = {8: 11, 32: 9, 64: 5, 128: 5}  # by streams: the shorter ones vary more
# Heads and GiB of KV cache: enough for stock's states of 128 requests (at 64 heads of 64, as the
# three sides share the GPU's memory), and where they do not fit.
SIZES = ((16, 12.0), (16, 3.0), (64, 20.0), (64, 10.0))
# GiB: what the engines of one wave, in the GPU's memory together, may take, and what each is
# reckoned to take besides its KV cache.
ROOM, BESIDES = 139, 15
GRAPHS = (8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)


@dataclass(frozen=True)
class Setting:
    """An engine to time: KDA heads, GiB of KV cache, one of ``SIDES``."""

    heads: int
    kv_gib: float
    side: str

    @property
    def memory(self) -> float:
        return self.kv_gib + BESIDES


def worker(heads: int, kv_gib: float, cores: set[int]) -> None:
    """Start an engine; then time what is asked for, ``streams seed`` a line, as lines of JSON."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints
    from bench.random_glm import Engine, greedy, kv_tokens, prompts, start

    engine = Engine(heads=heads, hidden=4096, kv_gib=kv_gib, seqs=128, batched=4096, graphs=GRAPHS)
    llm = start(engine)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    most, schedule = [0], scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        most[0] = max(most[0], len(scheduler.running))
        return output

    scheduler.schedule = watched
    greedy(llm, prompts(8, 128, 1), 32)
    if cores:
        os.sched_setaffinity(0, cores)  # of the thread that schedules and launches
    print(json.dumps({"kv_tokens": kv_tokens(llm)}), file=answers)
    for line in sys.stdin:
        streams, seed = map(int, line.split())
        asked, most[0] = prompts(streams, 128, seed), 0
        began = time.perf_counter()
        greedy(llm, asked, OUT)
        rate = streams * OUT / (time.perf_counter() - began)
        print(json.dumps({"rate": round(rate), "running": most[0]}), file=answers)


@dataclass
class Running:
    """A worker's process and what it has answered."""

    setting: Setting
    process: subprocess.Popen[str]
    log: IO[str]
    kv_tokens: int = 0
    rates: dict[int, list[int]] = field(default_factory=dict)  # by streams
    running: dict[int, int] = field(default_factory=dict)

    @classmethod
    def start(cls, setting: Setting, cores: str) -> Running:
        command = [sys.executable, "-m", "tests.support.with_fixes", SIDES[setting.side]]
        command += [sys.executable, "-m", "bench.glm5next_engine", "--worker"]
        command += [str(setting.heads), str(setting.kv_gib), cores]
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115, the process writes to it
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1
        )
        return cls(setting, process, log)

    def answer(self) -> dict[str, Any]:
        """Return the next line; raises CalledProcessError, and shows the log, if there is none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.log.seek(0)
            print(self.log.read()[-3000:], file=sys.stderr)
            raise subprocess.CalledProcessError(code, self.process.args)
        return dict(json.loads(line))

    def time(self, streams: int, seed: int, *, keep: bool = True) -> None:
        """Have a round timed, with prompts of that seed; its rate counts if it is to be kept."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: then there is no answer
            self.process.stdin.write(f"{streams} {seed}\n")
        found = self.answer()
        if keep:
            self.rates.setdefault(streams, []).append(found["rate"])
            self.running[streams] = max(found["running"], self.running.get(streams, 0))

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "heads": self.setting.heads,
                "kv_gib": self.setting.kv_gib,
                "fix": self.setting.side,
                "streams": streams,
                "tokens_per_s": round(median(rates)),
                "best": max(rates),
                "rates": rates,
                "running_at_once": self.running[streams],
                "kv_tokens": self.kv_tokens,
            }
            for streams, rates in self.rates.items()
        ]


def waves() -> list[list[Setting]]:
    """Return all settings in waves: the sides of a size together, and sizes that fit together."""
    found: list[list[Setting]] = [[]]
    for heads, kv_gib in SIZES:
        sides = [Setting(heads, kv_gib, side) for side in SIDES]
        if sum(each.memory for each in found[-1] + sides) > ROOM:
            found.append([])
        found[-1] += sides
    return found


def compare(settings: Sequence[Setting], cores: str) -> list[dict[str, Any]]:
    """Time the engines of a wave; raises CalledProcessError if one fails."""
    engines = [Running.start(setting, cores) for setting in settings]
    try:
        for engine in engines:
            engine.kv_tokens = engine.answer()["kv_tokens"]
        for streams, rounds in ROUNDS.items():
            for number in range(-1, rounds):  # the first warms up
                for engine in engines:
                    engine.time(streams, 100 * streams + number, keep=number >= 0)
        return [row for engine in engines for row in engine.rows()]
    finally:
        for engine in engines:
            engine.process.kill()


def core_list(text: str) -> str:
    """Return ``0,1,...`` as it is; raises ArgumentTypeError for a core that is not there."""
    known = os.sched_getaffinity(0)
    if not all(core.isdecimal() and int(core) in known for core in text.split(",")):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected some of {sorted(known)}")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    every = waves()
    which = range(len(every))
    parser.add_argument("--waves", type=int, nargs="+", default=which, choices=which, help="only")
    parser.add_argument(
        "--cores", type=core_list, help="0,1,...: where engines launch their kernels"
    )
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS, help="keep the rows there")
    options = parser.parse_args(arguments)
    if options.worker:
        heads, memory, cores = options.worker
        worker(int(heads), float(memory), {int(core) for core in cores.split(",") if core})
        return 0
    rows = []
    for number in options.waves:
        found = compare(every[number], options.cores or "")
        rows += found
        for row in found:
            print(*row.values(), flush=True)
    if options.save:
        import torch
        import triton

        gpu = {"name": torch.cuda.get_device_name(), "torch": torch.__version__}
        gpu["triton"] = triton.__version__
        command = "python -m bench.glm5next_engine " + " ".join(arguments or sys.argv[1:])
        print(save("glm5next-recoverssm-engine", command, rows, gpu, options.save))
    return 0


if __name__ == "__main__":
    sys.exit(main())
