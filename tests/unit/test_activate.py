"""Activation in one process: what is applied, and that whatever fails ends the process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.sandbox import Sandbox, make_sandbox

EDIT = ("edit-it", "vllm.sampler", "'stock'", "'patched'")
HOOK = """
def install(module):
    def greet():
        return "hooked"
    module.greet = greet
    return {"greet": greet}
"""


def test_edit_reaches_names_bound_by_from_import(sandbox: Sandbox) -> None:
    sandbox.edit(*EDIT)
    run = sandbox.code("from vllm.user import greet; print(greet())")
    assert run.stdout == "patched\n", run.stderr


def test_without_a_plan_nothing_is_touched_or_imported(sandbox: Sandbox) -> None:
    sandbox.edit(*EDIT)
    source = (
        "import sys; from vllm.user import greet; "
        "print(greet(), [n for n in sys.modules if n.startswith('vllm_overlay')])"
    )
    assert sandbox.code(source, plan=False).stdout == "stock []\n"


def test_inspect_and_traceback_see_the_patched_source(sandbox: Sandbox) -> None:
    sandbox.edit(
        "raise-it", "vllm.sampler", "    return GREETING", "    raise ValueError('patched line')"
    )
    run = sandbox.code(
        "import inspect, linecache, vllm.sampler as s; print(inspect.getsource(s.greet))\n"
        "assert s.__file__ == s.__spec__.origin == s.greet.__code__.co_filename\n"
        "assert s.__package__ == 'vllm' and '/store/' in s.__file__\n"
        "s.greet()"
    )
    assert "raise ValueError('patched line')" in run.stdout
    assert run.stderr.count("raise ValueError('patched line')") == 1  # the traceback's source line


def test_edited_package_keeps_its_path_and_relative_imports(sandbox: Sandbox) -> None:
    line = "from vllm.pack.inner import VALUE\n"
    sandbox.edit("pack", "vllm.pack", line, "from .inner import VALUE\nVALUE += 1\n")
    run = sandbox.code(
        "import vllm.pack as p, importlib.resources as r; print(p.VALUE, p.__path__[0]);"
        "print(r.files(p).joinpath('inner.py').is_file())"
    )
    assert run.stdout.splitlines() == [f"2 {sandbox.site}/vllm/pack", "True"], run.stderr


def test_added_module_lives_in_vllms_namespace(sandbox: Sandbox) -> None:
    sandbox.added("new", "vllm.pack.extra", "from .inner import VALUE\nDOUBLE = VALUE * 2\n")
    run = sandbox.code("from vllm.pack.extra import DOUBLE; print(DOUBLE)")
    assert run.stdout == "2\n", run.stderr


def test_added_package_and_its_module(sandbox: Sandbox) -> None:
    sandbox.added("new", "vllm.fresh", "NAME = 'fresh'\n", "__init__.py")
    sandbox.added("new", "vllm.fresh.state", "from vllm.fresh import NAME\n", "state.py")
    run = sandbox.code("import vllm.fresh.state as s; print(s.NAME, s.__package__)")
    assert run.stdout == "fresh vllm.fresh\n", run.stderr


def test_hook_runs_right_after_the_module(sandbox: Sandbox) -> None:
    sandbox.hook("hook-it", "vllm.sampler", HOOK)
    run = sandbox.code("from vllm.user import greet; print(greet())")
    assert run.stdout == "hooked\n", run.stderr


def test_edit_and_hook_on_one_module(sandbox: Sandbox) -> None:
    sandbox.edit(*EDIT)
    code = HOOK.replace('"hooked"', 'module.GREETING + " and hooked"')
    sandbox.hook("hook-it", "vllm.sampler", code)
    assert sandbox.code("import vllm.user as u; print(u.greet())").stdout == "patched and hooked\n"


def test_reload_applies_again(sandbox: Sandbox) -> None:
    sandbox.edit(*EDIT)
    sandbox.hook(
        "hook-it", "vllm.pack.inner", "def install(m):\n m.VALUE += 1\n return {'VALUE': m.VALUE}"
    )
    run = sandbox.code(
        "import importlib, vllm.sampler as s, vllm.pack.inner as i\n"
        "s.GREETING = 'lost'\n"
        "importlib.reload(s); importlib.reload(i); print(s.greet(), i.VALUE)"
    )
    assert run.stdout == "patched 2\n", run.stderr


def test_threads_importing_at_once_apply_once(sandbox: Sandbox) -> None:
    counter = (
        "import builtins\n"
        "def install(m):\n"
        " builtins.count = getattr(builtins, 'count', 0) + 1\n m.X = 1\n return {'X': 1}"
    )
    sandbox.hook("count", "vllm.sampler", counter)
    run = sandbox.code(
        "import builtins, threading\n"
        "def go():\n import vllm.sampler as s\n assert s.X == 1\n"
        "ts = [threading.Thread(target=go) for _ in range(16)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]; print(builtins.count)"
    )
    assert run.stdout == "1\n", run.stderr


def test_python_m_of_an_edited_module_is_patched(sandbox: Sandbox) -> None:
    sandbox.edit(
        "main",
        "vllm.sampler",
        "    return GREETING\n",
        "    return GREETING\n\n\nprint('patched main', __name__)\n",
    )
    run = sandbox.run("-m", "vllm.sampler")
    assert run.stdout == "patched main __main__\n", run.stderr
    assert sandbox.receipts()[0]["fixes"][0]["state"] == "applied"


def test_python_m_of_a_hooked_module_ends(sandbox: Sandbox) -> None:
    sandbox.hook("hook-it", "vllm.sampler", HOOK)
    run = sandbox.run("-m", "vllm.sampler")
    assert run.returncode == 78 and "hook-it" in run.stderr and run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def install(m):\n raise ImportError('gone')", "ImportError: gone"),
        ("def install(m):\n raise RuntimeError('two\\nlines')", "two\\nlines"),
        ("raise ImportError('at import')", "at import"),
        ("def install(m): pass", "None instead of a mapping"),
        ("def install(m): return {}", "{} instead of a mapping"),
        ("def install(m): return {'greet': 1}", "greet is"),
        ("def install(m): return {'Sampler.greet': 1}", "does not exist"),
        ("def other(m): return {}", "install"),
    ],
)
def test_hook_that_fails_cannot_be_swallowed(sandbox: Sandbox, code: str, says: str) -> None:
    sandbox.hook("bad-hook", "vllm.sampler", code)
    run = sandbox.code("import vllm.swallow; print('serving unpatched')")
    assert run.returncode == 78 and run.stdout == ""
    line = run.stderr
    assert line.count("\n") == 1 and "bad-hook" in line and "vllm.sampler" in line and says in line


def test_patched_source_that_raises_cannot_be_swallowed(sandbox: Sandbox) -> None:
    sandbox.edit("bad-edit", "vllm.sampler", "GREETING = 'stock'\n", "import missing_thing\n")
    run = sandbox.code("import vllm.swallow; print('serving unpatched')")
    assert run.returncode == 78 and run.stdout == "" and "missing_thing" in run.stderr


def test_source_that_changed_since_the_plan_ends(sandbox: Sandbox) -> None:
    sandbox.edit(*EDIT)
    sandbox.write()
    source = sandbox.source("vllm.sampler")
    source.write_text(source.read_text() + "# moved\n")
    run = sandbox.code("import vllm.swallow")
    assert run.returncode == 78 and "changed since the plan" in run.stderr
    assert "edit-it" in run.stderr and str(source) in run.stderr


@pytest.mark.parametrize("what", ["store", "hook", "added"])
def test_fix_that_changed_since_the_plan_ends(sandbox: Sandbox, what: str) -> None:
    sandbox.edit(*EDIT)
    hook = sandbox.hook("hook-it", "vllm.pack.inner", "def install(m):\n m.X = 1\n return {'X': 1}")
    added = sandbox.added("new", "vllm.extra", "X = 1\n")
    sandbox.write()
    (store,) = sandbox.home.glob("store/*/vllm/sampler.py")
    {"store": store, "hook": hook, "added": added}[what].write_text("X = 2\n")
    run = sandbox.code("import vllm.sampler, vllm.pack.inner, vllm.extra")
    assert run.returncode == 78 and "changed since the plan" in run.stderr, run.stderr


def test_stale_bytecode_is_never_run(sandbox: Sandbox) -> None:
    sandbox.hook("hook-it", "vllm.sampler", "def install(m):\n m.X = 1\n return {'X': 1}")
    source = sandbox.source("vllm.sampler")
    original = source.read_text()
    source.write_text(original.replace("stock", "stale"))
    compile_it = (
        "import py_compile as p, sys;"
        "p.compile(sys.argv[1], invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)"
    )
    sandbox.run("-c", compile_it, str(source), plan=False)
    source.write_text(original)
    assert (
        sandbox.code("import vllm.sampler as s; print(s.greet())", plan=False).stdout == "stale\n"
    )
    assert sandbox.code("import vllm.sampler as s; print(s.greet())").stdout == "stock\n"


def test_shadowed_vllm_ends(sandbox: Sandbox, tmp_path: Path) -> None:
    shadow = tmp_path / "shadow"
    (shadow / "vllm").mkdir(parents=True)
    (shadow / "vllm" / "__init__.py").write_text("")
    sandbox.edit(*EDIT)
    run = sandbox.code("import vllm", env={"PYTHONPATH": str(shadow)})
    assert run.returncode == 78 and str(shadow) in run.stderr and "PYTHONPATH" in run.stderr


def test_sourceless_vllm_that_shadows_ends(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "vllm.pyc").write_bytes(b"anything")
    run = sandbox.code("import vllm", env={"PYTHONPATH": str(tmp_path)})
    assert run.returncode == 78 and "vllm.pyc" in run.stderr


def test_added_module_that_vllm_has_by_now_ends(sandbox: Sandbox) -> None:
    sandbox.added("new", "vllm.extra", "X = 1\n")
    (sandbox.site / "vllm" / "extra.py").write_text("X = 2\n")
    run = sandbox.code("try:\n import vllm.extra\nexcept BaseException: pass")
    assert run.returncode == 78 and "vllm.extra" in run.stderr


@pytest.mark.parametrize("value", ["", "/nowhere/plan.json", "relative"])
def test_plan_that_cannot_be_read_ends_every_python(sandbox: Sandbox, value: str) -> None:
    run = sandbox.code("print('on')", plan=False, env={"VLLM_OVERLAY_PLAN": value})
    assert run.returncode == 78 and run.stdout == "" and run.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', "\x00"])
def test_torn_plan_ends(sandbox: Sandbox, text: str) -> None:
    sandbox.write().write_text(text)
    run = sandbox.code("print('on')")
    assert run.returncode == 78 and run.stdout == "" and run.stderr.count("\n") == 1


def test_altered_plan_ends(sandbox: Sandbox) -> None:
    sandbox.edit(*EDIT)
    path = sandbox.write()
    body = json.loads(path.read_text())
    body["modules"] = {}
    path.write_text(json.dumps(body))
    run = sandbox.code("print('on')")
    assert run.returncode == 78 and "altered" in run.stderr


def test_broken_overlay_ends_where_a_plan_is_set(sandbox: Sandbox) -> None:
    # Python prints what a .pth line raises, and goes on: the line must not raise.
    broken = sandbox.root / "broken" / "vllm_overlay"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('half installed')")
    environment = {"PYTHONPATH": str(broken.parent)}
    assert sandbox.code("print('on')", plan=False, env=environment).stdout == "on\n"
    run = sandbox.code("print('on')", env=environment)
    assert run.returncode == 78 and run.stdout == "" and "half installed" in run.stderr


def test_vllm_imported_before_the_plan_ends(sandbox: Sandbox) -> None:
    run = sandbox.code(
        "import os, vllm, vllm_overlay.activate as a\n"
        f"os.environ['VLLM_OVERLAY_PLAN'] = '{sandbox.write()}'\na.start()\nprint('on')",
        plan=False,
    )
    assert run.returncode == 78 and "before the plan" in run.stderr and run.stdout == ""


def test_start_is_idempotent_and_refuses_a_second_plan(sandbox: Sandbox) -> None:
    again = (
        "import os, sys, vllm_overlay.activate as a; n = len(sys.meta_path); a.start();"
        "assert len(sys.meta_path) == n"
    )
    assert sandbox.code(again).returncode == 0
    run = sandbox.code(again + "\nos.environ['VLLM_OVERLAY_PLAN'] = '/other'; a.start()")
    assert run.returncode == 78 and "second plan" in run.stderr


def test_envs_knows_the_plan_and_the_flags(sandbox: Sandbox) -> None:
    sandbox.edit(*EDIT)
    run = sandbox.code(
        "from vllm.envs import environment_variables as e;"
        "print(e['VLLM_OVERLAY_PLAN'](), e['VLLM_EDIT_IT'](), e['VLLM_PORT']())"
    )
    assert run.stdout == "0123456789abcdef 1 None\n", run.stderr


def test_dist_packages_layout(tmp_path: Path) -> None:
    sandbox = make_sandbox(tmp_path / "env", layout="dist-packages")
    sandbox.edit(*EDIT)
    assert sandbox.code("import vllm.user as u; print(u.greet())").stdout == "patched\n"


def test_isolated_mode_is_patched(sandbox: Sandbox) -> None:
    sandbox.edit(*EDIT)
    run = sandbox.run("-I", "-c", "import vllm.user as u; print(u.greet())")
    assert run.stdout == "patched\n", run.stderr
