"""What the overlay costs each start of Python: `python -c pass`, as medians and ratios.

Three cases, run in turn so that the machine's moods hit them alike: without the .pth file, with it
and no plan, and with a plan of ten fixes. Each in a new virtual environment of its own with no
other package. ``--save`` keeps the result in bench/results/.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.bench.record import save
from vllm_overlay.plan import Plan, PlannedFix, write_plan

CHECKOUT = Path(__file__).resolve().parent.parent
PTH = CHECKOUT / "vllm_overlay" / "activate" / "vllm_overlay.pth"
FIXES = 10


@dataclass(frozen=True)
class Case:
    """One way to start Python."""

    name: str
    python: Path
    environ: Mapping[str, str]

    def run(self, code: str) -> str:
        """Run code and return what it prints."""
        command = [str(self.python), "-c", code]
        printed: str = subprocess.check_output(command, env=self.environ, text=True)
        return printed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="starts a case (default: 60)")
    parser.add_argument("--save", action="store_true", help="write into bench/results/")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        medians = measure(cases(Path(folder)), options.rounds)
    rows = [
        {"case": name, "median_ms": round(ms, 2), "ratio": round(ms / medians["no .pth"], 3)}
        for name, ms in medians.items()
    ]
    for row in rows:
        print(f"{row['case']:<20} {row['median_ms']:>8} ms   x {row['ratio']}")
    if options.save:
        command = f"make bench-activation ARGS='--rounds {options.rounds} --save'"
        print(save("activation", command, rows))
    return 0


def cases(folder: Path) -> list[Case]:
    """Make the environments and the plan under ``folder``."""
    bare = python(folder / "bare", with_pth=False)
    overlaid = python(folder / "overlaid", with_pth=True)
    environ = {"PATH": os.environ["PATH"]}
    plan = write_plan(ten_fixes(), folder / "state")
    return [
        Case("no .pth", bare, environ),
        Case(".pth, no plan", overlaid, environ),
        Case(f"plan of {FIXES} fixes", overlaid, {**environ, "VLLM_OVERLAY_PLAN": str(plan)}),
    ]


def python(env: Path, *, with_pth: bool) -> Path:
    """Make a virtual environment that finds this checkout, and return its interpreter."""
    venv.create(env, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = env / "lib" / version / "site-packages"
    (site / "_vllm_overlay.pth").write_text(f"{CHECKOUT}\n")
    if with_pth:
        (site / PTH.name).write_bytes(PTH.read_bytes())
    return env / "bin" / "python"


def ten_fixes() -> Plan:
    """Return a plan of ten fixes, each an edit and a hook of a module of its own."""
    names = [f"fix-{number}" for number in range(FIXES)]
    modules = {f"vllm.v1.core.part_{name.replace('-', '_')}": name for name in names}
    return Plan(
        cache_key="0" * 64,
        recipe={"name": "ten", "file": "/recipes/ten.yaml", "variant": None},
        folders={"recipes": "/recipes", "fixes": "/fixes", "models": "/models", "source": "image"},
        vllm={"version": "0.32.0", "path": "/nowhere/vllm", "torch": "2.13.0"},
        model="/models/ten",
        served_model="ten",
        serve={"host": "127.0.0.1", "port": 8000},
        env={},
        fixes=tuple(
            PlannedFix(fix, "apply", None, None, "recipe", (), (target(module),), "0" * 64)
            for module, fix in modules.items()
        ),
        overrides=(),
        requires={},
        smoke={},
        modules={module: detail(module, fix) for module, fix in modules.items()},
    )


def target(module: str) -> dict[str, Any]:
    return {"kind": "edit", "module": module, "symbols": ["Scheduler.schedule", "check_stop"]}


def detail(module: str, fix: str) -> dict[str, Any]:
    path = f"{module.replace('.', '/')}.py"
    folder = f"/fixes/{fix}"
    hook = {"fix": fix, "kind": "hook", "file": f"{folder}/hooks.py", "sha256": "0" * 64}
    edit = {"fix": fix, "kind": "edit", "file": f"{folder}/a.diff", "sha256": "0" * 64}
    return {
        "original": "0" * 64,
        "path": path,
        "package": False,
        "source": {"file": f"store/{'0' * 64}/{path}", "sha256": "0" * 64},
        "fixes": [{**edit, "function": None}, {**hook, "function": "install"}],
    }


def measure(starts: Sequence[Case], rounds: int) -> dict[str, float]:
    """Return each case's median over ``rounds`` starts, in milliseconds."""
    taken: dict[str, list[float]] = {case.name: [] for case in starts}
    for case in starts:
        case.run("pass")  # writes the .pyc files
    for _ in range(rounds):
        for case in starts:
            began = time.perf_counter()
            case.run("pass")
            taken[case.name].append((time.perf_counter() - began) * 1000)
    return {name: statistics.median(times) for name, times in taken.items()}


if __name__ == "__main__":
    sys.exit(main())
