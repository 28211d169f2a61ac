"""How long `plan` takes on the installed vLLM with ten fixes, and where the time goes.

The recipe is one of this checkout (the demo's by default) with ten made-up fixes of large modules
instead of its own: five edits, five hooks. State goes to an empty folder, so that the first call is
cold; the others are warm. ``--save`` keeps the result in bench/results/.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from vllm_overlay.bench.record import save
from vllm_overlay.folders import find_folders
from vllm_overlay.symbols import definitions
from vllm_overlay.upstream import Tree, installed_tree

MODULES = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.core.sched.scheduler",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.core",
    "vllm.config.vllm",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.engine.async_llm",
    "vllm.envs",
    "vllm.v1.worker.gpu_worker",
    "vllm.sampling_params",
)
# Run in the child: each step that `resolve` calls is timed; what is left is called "rest".
SPLIT = """
import time; began = time.perf_counter()
import json, sys
from vllm_overlay import cli, resolve
spent = {"imports": time.perf_counter() - began}
def timed(owner, name):
    inner = getattr(owner, name)
    def step(*args, **more):
        start = time.perf_counter()
        try:
            return inner(*args, **more)
        finally:
            spent[name] = spent.get(name, 0) + time.perf_counter() - start
    setattr(owner, name, step)
steps = ("load_recipe load_fixes installed_tree judge find_model _environment _serve cache_key "
         "plan_modules _planned")
for name in steps.split():
    timed(resolve, name)
sys.stdout = open("/dev/null", "w")
start = time.perf_counter()
cli.plan(sys.argv[1], as_json=True)
spent["rest"] = time.perf_counter() - start - sum(spent.values()) + spent["imports"]
sys.stdout = sys.__stdout__
print(json.dumps(spent))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="demo", help="of this checkout (default: demo)")
    parser.add_argument("--rounds", type=int, default=15, help="warm calls (default: 15)")
    parser.add_argument("--save", action="store_true", help="write into bench/results/")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        environ = prepare(Path(folder), options.recipe)
        rows = measure(environ, options.rounds)
    for row in rows:
        print(f"{row['step']:<16} {row['ms']:>8} ms")
    if options.save:
        command = f"make bench-plan ARGS='--recipe {options.recipe} --rounds {options.rounds}'"
        print(save("plan", f"{command[:-1]} --save'", rows))
    return 0


def prepare(folder: Path, recipe: str) -> dict[str, str]:
    """Write recipe and fixes below ``folder``; return the environment that leads there."""
    own = find_folders(os.environ)
    body = yaml.safe_load((own.recipes / f"{recipe}.yaml").read_text())
    tree = installed_tree()
    fixes = [write_fix(folder / "fixes", tree, module) for module in MODULES]
    (folder / "recipes").mkdir()
    ten = {**body, "name": "ten", "fixes": fixes}
    (folder / "recipes" / "ten.yaml").write_text(yaml.safe_dump(ten, sort_keys=False))
    return {
        **os.environ,
        "VLLM_OVERLAY_HOME": str(folder / "home"),
        "VLLM_OVERLAY_RECIPES": str(folder / "recipes"),
        "VLLM_OVERLAY_FIXES": str(folder / "fixes"),
        "VLLM_OVERLAY_MODELS": str(own.models),
    }


def write_fix(folder: Path, tree: Tree, module: str) -> str:
    """Write a fix of a module, every second one a hook, and return its name."""
    name = f"fix-{MODULES.index(module)}"
    path, source = tree.path(module), tree.source(module)
    if path is None or source is None:
        raise SystemExit(f"vLLM {tree.version} has no {module}: change MODULES")
    symbol, last = first_function(source, module)
    place = folder / name
    place.mkdir(parents=True)
    body = {
        "schema": 1, "name": name, "summary": "for a measurement", "source": "bench/plan.py",
        "vllm": f"=={tree.release}",
        "reviewed": {tree.release: {module: {symbol: tree.symbols(module)[symbol]}}},
    }  # fmt: skip
    if MODULES.index(module) % 2:
        body["hooks"] = {module: "hooks.py:install"}
        (place / "hooks.py").write_text("def install(module):\n    return {}\n")
    else:
        body["edits"] = {module: "x.diff"}
        old = source.decode().splitlines(keepends=True)
        line = last.lineno - 1
        new = [*old[:line], " " * last.col_offset + "assert True\n", *old[line:]]
        relative = path.relative_to(tree.root)
        diff = difflib.unified_diff(old, new, f"a/{relative}", f"b/{relative}")
        (place / "x.diff").write_text("".join(diff))
    (place / "fix.yaml").write_text(yaml.safe_dump(body, sort_keys=False))
    return name


def first_function(source: bytes, module: str) -> tuple[str, ast.stmt]:
    """Return the first function or method, and its last statement."""
    for name, nodes in definitions(source, module).items():
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                return name, node.body[-1]
    raise SystemExit(f"{module} has no function: change MODULES")


def measure(environ: Mapping[str, str], rounds: int) -> list[dict[str, object]]:
    """Return the median of each step in milliseconds; the whole call first, cold and warm."""
    command = [str(Path(sys.executable).with_name("vllm-overlay")), "plan", "ten", "--json"]
    calls = [seconds(command, environ) for _ in range(rounds + 1)]
    split = [sys.executable, "-c", SPLIT, "ten"]
    found = [
        json.loads(subprocess.check_output(split, env=environ, text=True)) for _ in range(rounds)
    ]
    rows = [("cold call", calls[0]), ("warm call", statistics.median(calls[1:]))]
    rows += [(step, statistics.median(times[step] for times in found)) for step in found[0]]
    return [{"step": step, "ms": round(taken * 1000, 1)} for step, taken in rows]


def seconds(command: Sequence[str], environ: Mapping[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
