"""Tokens a second of a small random GLM-5.3-Flash in vLLM's engine: stock, exact and fast.

``python -m bench.glm5next_engine``: engines start beside each other and are then timed in turn,
each alone on the GPU. Eight layers of real width (six KDA), MTP with seven drafts, synthetic
acceptance 4.0, 128 tokens in and 256 out, prefix caching off.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from vllm_overlay.bench.record import RESULTS, save

FIX = "glm5next-recoverssm"
SIDES = {"off": "-", "on": FIX, "fast": f"{FIX}=fast"}
STREAMS, OUT, ROUNDS = (8, 32, 64, 128), 256, 3
START = 420  # seconds until all engines of a wave have started
# Heads and GiB of KV cache: enough for stock's states of 128 requests, and where they do not fit.
SIZES = ((16, 12.0), (16, 3.0), (64, 36.0), (64, 10.0))
# GiB: what the engines of one wave, in the GPU's memory together, may take, and what each is
# reckoned to take besides its KV cache.
ROOM, BESIDES = 130, 10
Setting = tuple[int, float, str]  # heads, GiB of KV cache, side
GRAPHS = (8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)


def worker(folder: Path, heads: int, kv_gib: float, side: str) -> None:
    """Start one engine; once all have started, take the GPU and time it."""
    from bench.random_glm import Engine, greedy, kv_tokens, prompts, start

    engine = Engine(heads=heads, hidden=4096, kv_gib=kv_gib, seqs=128, batched=8192, graphs=GRAPHS)
    llm = start(engine)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    most, schedule = [0], scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        most[0] = max(most[0], len(scheduler.running))
        return output

    scheduler.schedule = watched
    greedy(llm, prompts(8, 128, 1), 32)
    name = f"{heads}-{kv_gib}-{side}"
    (folder / f"{name}.ready").touch()
    began = time.monotonic()
    while len(list(folder.glob("*.ready"))) < len(list(folder.glob("*.wanted"))):
        if time.monotonic() - began > START:
            raise TimeoutError("another engine of the wave has not started")
        time.sleep(0.1)
    with (folder / "turn").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        greedy(llm, prompts(8, 128, 2), 32)
        rows = []
        for streams in STREAMS:
            most[0], rates = 0, []
            for number in range(ROUNDS):
                asked = prompts(streams, 128, 100 * streams + number)
                began = time.perf_counter()
                greedy(llm, asked, OUT)
                rates.append(streams * OUT / (time.perf_counter() - began))
            rows.append(
                {
                    "heads": heads,
                    "kv_gib": kv_gib,
                    "fix": side,
                    "streams": streams,
                    "tokens_per_s": round(median(rates)),
                    "rates": [round(rate) for rate in rates],
                    "running_at_once": most[0],
                    "kv_tokens": kv_tokens(llm),
                }
            )
    (folder / f"{name}.json").write_text(json.dumps(rows))


def waves() -> list[list[Setting]]:
    """Return all sizes and sides, those together that fit into the GPU's memory together."""
    found: list[list[Setting]] = [[]]
    for heads, kv_gib in SIZES:
        for side in SIDES:
            if sum(memory + BESIDES for _, memory, _ in found[-1]) + kv_gib + BESIDES > ROOM:
                found.append([])
            found[-1].append((heads, kv_gib, side))
    return found


def compare(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Time the engines of a wave; raises CalledProcessError if one fails."""
    folder = Path(tempfile.mkdtemp())
    names = ["-".join(map(str, setting)) for setting in settings]
    for name in names:
        (folder / f"{name}.wanted").touch()
    started = []
    for name, (heads, kv_gib, side) in zip(names, settings, strict=True):
        command = [sys.executable, "-m", "tests.support.with_fixes", SIDES[side]]
        command += [sys.executable, "-m", "bench.glm5next_engine", "--worker", str(folder)]
        command += [str(heads), str(kv_gib), side]
        with (folder / f"{name}.log").open("w") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    rows = []
    for name, process in zip(names, started, strict=True):
        if process.wait():
            for other in started:
                other.kill()
            print((folder / f"{name}.log").read_text()[-3000:], file=sys.stderr)
            raise subprocess.CalledProcessError(process.returncode, process.args)
        rows += json.loads((folder / f"{name}.json").read_text())
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    every = waves()
    which = range(len(every))
    parser.add_argument("--waves", type=int, nargs="+", default=which, choices=which, help="only")
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS, help="keep the rows there")
    options = parser.parse_args(arguments)
    if options.worker:
        folder, heads, memory, side = options.worker
        worker(Path(folder), int(heads), float(memory), side)
        return 0
    rows = []
    for number in options.waves:
        found = compare(every[number])
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
