"""What a hook may claim, and ways in which a fix could be missed without anybody noticing."""

from __future__ import annotations

import pytest

from tests.support.sandbox import Sandbox

SET = """
def install(m):
    def greet():
        return {0!r}
    m.greet = greet
    return {{'greet': greet}}
"""
WRAP = """
def install(m):
    original = m.greet
    def greet():
        return original() + ' and wrapped'
    m.greet = greet
    return {'greet': greet}
"""


def refused(sandbox: Sandbox, code: str = "import vllm.user; print('on')") -> str:
    """Return the one line with which a process ends."""
    run = sandbox.code(code)
    assert run.returncode == 78 and run.stdout == "", run.stdout + run.stderr
    assert run.stderr.count("\n") == 1
    return run.stderr


def test_a_hook_that_leaves_all_as_it_was(sandbox: Sandbox) -> None:
    sandbox.hook("idle", "vllm.sampler", "def install(m):\n    return {'greet': m.greet}\n")
    assert "greet is what it was before the hook" in refused(sandbox)


def test_a_hook_that_leaves_a_method_or_an_entry_as_it_was(sandbox: Sandbox) -> None:
    code = (
        "def install(m):\n"
        "    name = 'VLLM_PORT'\n"
        "    return {f'environment_variables.{name}': m.environment_variables[name]}\n"
    )
    sandbox.hook("idle", "vllm.envs", code)
    assert "before the hook" in refused(sandbox, "import vllm.envs; print('on')")


def test_two_hooks_of_one_name_need_after(sandbox: Sandbox) -> None:
    sandbox.hook("first", "vllm.sampler", SET.format("first"))
    sandbox.hook("second", "vllm.sampler", WRAP)
    line = refused(sandbox)
    assert "second" in line and "first" in line and "after" in line


def test_a_hook_builds_upon_one_that_it_names(sandbox: Sandbox) -> None:
    sandbox.after["second"] = ["first"]
    sandbox.hook("first", "vllm.sampler", SET.format("first"))
    sandbox.hook("second", "vllm.sampler", WRAP)
    run = sandbox.code("import vllm.user as u; print(u.greet())")
    assert run.stdout == "first and wrapped\n", run.stderr


def test_a_later_hook_that_undoes_an_earlier_one_in_silence(sandbox: Sandbox) -> None:
    sandbox.hook("first", "vllm.sampler", SET.format("first"))
    undo = "def install(m):\n    m.greet = print\n    m.X = 1\n    return {'X': 1}\n"
    sandbox.hook("second", "vllm.sampler", undo)
    assert "first" in refused(sandbox)


def test_a_name_bound_before_the_hook_ran(sandbox: Sandbox) -> None:
    """A module that the hooked one imports has taken the old function already."""
    early = sandbox.site / "vllm" / "early.py"
    early.write_text(
        "import sys\n\n\ndef take():\n"
        "    global greet\n    greet = sys.modules['vllm.sampler'].greet\n"
    )
    source = sandbox.source("vllm.sampler")
    source.write_text(source.read_text() + "\nimport vllm.early\nvllm.early.take()\n")
    sandbox.hook("late", "vllm.sampler", SET.format("late"))
    assert "vllm.early.greet holds what it replaced" in refused(sandbox)


@pytest.mark.parametrize("error", ["SystemExit(0)", "__import__('asyncio').CancelledError()"])
def test_what_no_except_exception_catches(sandbox: Sandbox, error: str) -> None:
    sandbox.hook("bad", "vllm.sampler", f"def install(m):\n    raise {error}\n")
    guarded = "try:\n import vllm.sampler\nexcept BaseException: pass\nprint('on')"
    assert "bad" in refused(sandbox, guarded)


def test_a_module_that_leaves_its_thread(sandbox: Sandbox) -> None:
    sandbox.edit("quit", "vllm.sampler", "GREETING = 'stock'\n", "raise SystemExit(0)\n")
    threaded = "import threading, vllm\ndef go():\n import vllm.sampler\n"
    threaded += "t = threading.Thread(target=go); t.start(); t.join(); print('on')"
    assert "SystemExit" in refused(sandbox, threaded)


def test_a_module_loaded_past_the_finder(sandbox: Sandbox) -> None:
    sandbox.edit("edit-it", "vllm.sampler", "'stock'", "'patched'")
    sandbox.added("new", "vllm.extra", "X = 1\n")
    past = f"""
import importlib.util as u, sys, vllm
spec = u.spec_from_file_location('vllm.sampler', {str(sandbox.source("vllm.sampler"))!r})
module = u.module_from_spec(spec)
sys.modules['vllm.sampler'] = module
spec.loader.exec_module(module)
import vllm.extra
print('on')
"""
    assert "vllm.sampler" in refused(sandbox, past)


def test_a_finder_that_is_put_before_the_overlays(sandbox: Sandbox) -> None:
    sandbox.edit("edit-it", "vllm.sampler", "'stock'", "'patched'")
    run = sandbox.code(
        "import importlib.machinery as m, sys, vllm\n"
        "class Other:\n"
        " def find_spec(self, name, path=None, target=None):\n"
        "  return m.PathFinder.find_spec(name, path) if name == 'vllm.sampler' else None\n"
        "sys.meta_path.insert(0, Other())\n"
        "import vllm.envs, vllm.user as u; print(u.greet(), type(sys.meta_path[0]).__name__)"
    )
    assert run.stdout == "patched Finder\n", run.stderr


def test_a_look_for_vllm_is_no_import(sandbox: Sandbox) -> None:
    sandbox.edit("edit-it", "vllm.sampler", "'stock'", "'patched'")
    look = "import importlib.util as u; print(u.find_spec('vllm') is not None)"
    assert sandbox.code(look).stdout == "True\n" and sandbox.receipts() == []


def test_code_of_a_hooked_module_is_not_given_away(sandbox: Sandbox) -> None:
    sandbox.hook("late", "vllm.sampler", SET.format("late"))
    code = """
import importlib.util as u
try:
    u.find_spec('vllm.sampler').loader.get_code('vllm.sampler')
except BaseException:
    pass
print('on')
"""
    assert "late" in refused(sandbox, code)


def test_one_hook_file_for_several_modules_runs_once(sandbox: Sandbox) -> None:
    code = "import builtins\nbuiltins.runs = getattr(builtins, 'runs', 0) + 1\n"
    code += "def install(m):\n    m.X = 1\n    return {'X': 1}\n"
    sandbox.hook("both", "vllm.sampler", code)
    sandbox.hook("both", "vllm.pack.inner", code)
    run = sandbox.code("import builtins, vllm.sampler, vllm.pack.inner; print(builtins.runs)")
    assert run.stdout == "1\n", run.stderr
