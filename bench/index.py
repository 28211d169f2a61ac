"""How long all symbols of a vLLM take to index: for the first time, and from the cache.

Without an argument, the installed vLLM. ``--save`` keeps the result in bench/results/.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm_overlay.bench.record import save
from vllm_overlay.folders import home_folder
from vllm_overlay.index import index
from vllm_overlay.releases import find_tree


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", help="a release, a wheel or a folder")
    parser.add_argument("--save", action="store_true", help="write into bench/results/")
    options = parser.parse_args(arguments)
    tree = find_tree(options.vllm, home_folder(os.environ))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for call in ("first", "cached"):
            began, cpu_began = time.perf_counter(), cpu_seconds()
            found = index(replace(tree, cache=Path(folder)))
            wall, cpu = time.perf_counter() - began, cpu_seconds() - cpu_began
            rows.append({"call": call, "wall_s": round(wall, 2), "cpu_s": round(cpu, 2)})
    print(f"vLLM {tree.version}: {len(found)} modules, {sum(map(len, found.values()))} symbols")
    for row in rows:
        print(f"{row['call']:<8} {row['wall_s']:>8} s  {row['cpu_s']:>8} s of CPU time")
    if options.save:
        which = f"--vllm {options.vllm} " if options.vllm else ""
        print(save("index", f"make bench-index ARGS='{which}--save'", rows))
    return 0


def cpu_seconds() -> float:
    """Return what this process and the workers that have ended have used."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


if __name__ == "__main__":
    sys.exit(main())
