"""Activation on modules of the real vLLM, without starting an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fixes import edit_line, write_fix
from tests.support.plans import write_fixes_plan
from tests.support.serving import environment

REGISTRY = "vllm.model_executor.models.registry"
# How vLLM asks its registry about a model: a pickled function on standard input.
ASK = """
import cloudpickle, os, subprocess, sys, tempfile
out = os.path.join(tempfile.mkdtemp(), "out")
data = cloudpickle.dumps((lambda: 41 + 1, out))
run = subprocess.run([sys.executable, "-m", sys.argv[1]], input=data)
print(run.returncode, os.path.exists(out))
"""


def run(plan: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_OVERLAY_PLAN": str(plan)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(home, env),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def edit(tmp_path: Path, module: str, old: str, new: str) -> Path:
    """Plan a fix that replaces one line of a module of vLLM."""
    edit_line(tmp_path / "fixes", module, old, new)
    return write_fixes_plan(tmp_path / "fixes", tmp_path / "home")


def hook(tmp_path: Path, module: str, code: str) -> Path:
    hooks = {module: "hooks.py:install"}
    write_fix(tmp_path / "fixes", "a-hook", {"hooks.py": code}, hooks=hooks)
    return write_fixes_plan(tmp_path / "fixes", tmp_path / "home")


def test_python_m_of_vllms_registry_is_patched(tmp_path: Path) -> None:
    old = "    result = fn()"
    plan = edit(tmp_path, REGISTRY, old, f"{old}\n    print('patched registry answers', result)")
    done = run(plan, tmp_path / "home", "-c", ASK, REGISTRY)
    assert "patched registry answers 42" in done.stdout and "0 True" in done.stdout, done.stderr
    receipts = [json.loads(path.read_text()) for path in plan.parent.glob("receipts/*.json")]
    assert [item["fixes"][0]["modules"] for item in receipts] == [{REGISTRY: "applied"}]


def test_python_m_of_vllms_registry_ends_where_a_hook_would_be_missed(tmp_path: Path) -> None:
    plan = hook(tmp_path, REGISTRY, "def install(m):\n    m.X = 1\n    return {'X': 1}\n")
    done = run(plan, tmp_path / "home", "-c", ASK, REGISTRY)
    assert "78 False" in done.stdout and "a-hook" in done.stderr


def test_names_bound_by_from_import_are_patched(tmp_path: Path) -> None:
    """vLLM's plugins load after the scheduler has bound check_stop: a plugin misses it."""
    code = """
def install(module):
    def check_stop(*args, **kwargs):
        raise NotImplementedError
    module.check_stop = check_stop
    return {"check_stop": check_stop}
"""
    plan = hook(tmp_path, "vllm.v1.core.sched.utils", code)
    source = "import vllm.v1.core.sched.scheduler as s; print(s.check_stop.__code__.co_filename)"
    done = run(plan, tmp_path / "home", "-c", source)
    assert done.stdout.strip().endswith("fixes/a-hook/hooks.py"), done.stderr


def test_source_is_the_patched_one(tmp_path: Path) -> None:
    module = "vllm.v1.core.sched.utils"
    line = "def remove_all(lst: list, items_to_remove: set) -> list:"
    plan = edit(tmp_path, module, line, f"# patched\n{line}")
    source = (
        f"import inspect, {module} as m; print(inspect.getsource(m).count('# patched'));"
        "print(m.__file__ == m.remove_all.__code__.co_filename, '/store/' in m.__file__)"
    )
    assert run(plan, tmp_path / "home", "-c", source).stdout == "1\nTrue True\n"


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError"])
def test_vllm_cannot_swallow_a_hooks_failure(tmp_path: Path, error: str) -> None:
    plan = hook(tmp_path, "vllm.v1.core.sched.utils", f"def install(m):\n    raise {error}('no')\n")
    source = "try:\n import vllm.v1.core.sched.scheduler\nexcept BaseException: pass\nprint('on')"
    done = run(plan, tmp_path / "home", "-c", source)
    assert done.returncode == 78 and "on\n" not in done.stdout
    assert done.stderr.splitlines()[-1].startswith("vllm-overlay: pid ")


def test_torch_compile_of_an_edited_function(tmp_path: Path) -> None:
    """torch.compile asserts that source and code agree, and reads the source for its messages."""
    module = "vllm.v1.core.sched.utils"
    line = "def remove_all(lst: list, items_to_remove: set) -> list:"
    plan = edit(tmp_path, module, line, f"def twice(x):\n    return x * 2\n\n\n{line}")
    source = (
        f"import torch, {module} as m\n"
        "f = torch.compile(m.twice, backend='eager', fullgraph=True)\n"
        "print(f(torch.ones(2)).tolist())"
    )
    assert run(plan, tmp_path / "home", "-c", source).stdout == "[2.0, 2.0]\n"


def test_an_edited_module_finds_the_files_beside_the_original(tmp_path: Path) -> None:
    """vLLM's registry hashes the source of a model's module, which it looks for beside itself."""
    old = "    result = fn()"
    plan = edit(tmp_path, REGISTRY, old, f"{old}\n    result = result")
    source = (
        f"import {REGISTRY} as r, pathlib as p; at = p.Path(r.__file__).parent\n"
        "print((at / 'llama.py').is_file(), (at.parent / 'layers').is_dir(), 'store' in str(at))"
    )
    assert run(plan, tmp_path / "home", "-c", source).stdout == "True True True\n"
