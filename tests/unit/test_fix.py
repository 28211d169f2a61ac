"""Fixes: what a folder becomes, and how each mistake in it is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vllm_overlay.errors import EXIT_CONFIG, ConfigError, ConfigErrors
from vllm_overlay.fix import Fix, Flag, Hook, check_needs, load_fix, load_fixes
from vllm_overlay.needs import Subject
from vllm_overlay.schemas import fix_schema

ROOT = Path(__file__).resolve().parents[2]
HEAD = 'schema: 1\nname: f\nsummary: s\nsource: us\nvllm: ">=0.32.0,<0.33"\n'
HOOK = "hooks: {vllm.a: 'hooks.py:install'}\n"


@pytest.fixture
def fixes(tmp_path: Path) -> Path:
    """A fixes folder with the fix ``f``, whose files are right."""
    make(tmp_path, "f", HEAD + HOOK)
    return tmp_path


def make(fixes: Path, name: str, manifest: str) -> Path:
    folder = fixes / name
    folder.mkdir(exist_ok=True)
    (folder / "fix.yaml").write_text(manifest)
    (folder / "hooks.py").write_text("def install(module):\n    return {}\n")
    (folder / "new.py").write_text("x = 1\n")
    (folder / "b.diff").write_text("--- a/vllm/b.py\n")
    return folder


def refusals(fixes: Path) -> list[str]:
    """Return the refusals of a fixes folder, with the folder left out of their places."""
    with pytest.raises((ConfigError, ConfigErrors)) as caught:
        load_fixes(fixes)
    error = caught.value
    assert isinstance(error, ConfigError | ConfigErrors)
    assert error.exit_code == EXIT_CONFIG
    return str(error).replace(f"{fixes}/", "").splitlines()


def test_loads_a_fix_with_everything(tmp_path: Path) -> None:
    folder = make(
        tmp_path,
        "overlay-route",
        """\
schema: 1
name: overlay-route
summary: one line
source: a page
flag: {name: VLLM_X, values: ["0", "1", "fast"], default: fast}
vllm: ">=0.32.0,<0.33.0"
modules: {vllm.a.new: new.py}
edits: {vllm.a.b: b.diff}
hooks: {vllm.c.d: "hooks.py:install"}
needs:
  - {serve: speculative-config, present: true, why: "it verifies drafts"}
  - {env: VLLM_USE_V2_MODEL_RUNNER, in: ["1"], default: "0", why: "the old one has no hook"}
reviewed:   {"0.32.0": {vllm.a.b: {"Cls.meth": "0123abcd"}}}
upstreamed: {"0.33": {vllm.a.b: {"Cls.meth": "0123abce"}}}
""",
    )
    make(
        tmp_path,
        "other",
        HEAD.replace("name: f", "name: other") + HOOK + "after: [overlay-route]\n",
    )
    fixes = load_fixes(tmp_path)
    assert list(fixes) == ["other", "overlay-route"]
    assert fixes["other"].after == ("overlay-route",)
    assert fixes["other"].flag is None
    fix = fixes["overlay-route"]
    assert fix.flag == Flag("VLLM_X", ("0", "1", "fast"), "fast")
    assert fix.modules == {"vllm.a.new": folder / "new.py"}
    assert fix.edits == {"vllm.a.b": folder / "b.diff"}
    assert fix.hooks == {"vllm.c.d": Hook(folder / "hooks.py", "install")}
    assert fix.reviewed == {"0.32.0": {"vllm.a.b": {"Cls.meth": "0123abcd"}}}
    assert fix.upstreamed == {"0.33": {"vllm.a.b": {"Cls.meth": "0123abce"}}}
    assert (fix.folder, fix.file) == (folder, folder / "fix.yaml")
    assert [need.place.line for need in fix.needs] == [11, 12]
    assert fix.places.at("edits", "vllm.a.b").line == 8


def test_a_flag_by_name_is_off_or_on(fixes: Path) -> None:
    make(fixes, "f", HEAD + HOOK + "flag: VLLM_F\n")
    assert load_fix(fixes / "f").flag == Flag("VLLM_F", ("0", "1"), "1")


def test_a_file_is_named_relative_to_its_folder(fixes: Path) -> None:
    make(fixes, "f", HEAD + f"modules: {{vllm.b: {fixes}/f/new.py}}\n")
    assert "leads out of the fix's folder" in refusals(fixes)[0]


def test_a_relative_folder_gives_absolute_paths(
    fixes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fixes)
    assert load_fix(Path("f")).hooks["vllm.a"].file == fixes / "f" / "hooks.py"


def test_folders_that_hold_no_fix_are_refused_and_other_files_are_not_fixes(fixes: Path) -> None:
    (fixes / "README.md").write_text("text")
    (fixes / ".git").mkdir()
    (fixes / "__pycache__").mkdir()
    assert list(load_fixes(fixes)) == ["f"]
    (fixes / "empty").mkdir()
    assert refusals(fixes) == ["empty: this fix has no fix.yaml; expected a folder with a fix.yaml"]
    with pytest.raises(ConfigError, match="there is no such fix"):
        load_fix(fixes / "absent")
    with pytest.raises(ConfigError, match="this cannot be read: No such file"):
        load_fixes(fixes / "absent")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hook: {}", "unknown key 'hook'; did you mean 'hooks'?"),
        ("flag: VLLM_f", "6:7: this is no flag of a fix; found the text 'VLLM_f'"),
        ("flag: VLLM_OVERLAY_PLAN", "6:7: the flag 'VLLM_OVERLAY_PLAN' is a variable of"),
        ("flag: [VLLM_F]", "6:7: wrong type of 'flag'; found a list; expected a map"),
        ("flag: {name: VLLM_F, values: ['1', '2']}", "lack the one that turns the fix off"),
        (
            "flag: {name: VLLM_F, values: [0, '1']}",
            "6:31: wrong type of 'flag.values.0'; found the "
            'number 0; expected text; quote it: "0"',
        ),
        ("flag: {name: VLLM_F, values: ['0', '1', '1']}", "has a value twice"),
        ("flag: {name: VLLM_F, values: ['0', a]}", "is none of its on-values; expected a"),
        ("flag: {name: VLLM_F, default: '0'}", "is none of its on-values"),
        ("flag: {name: VLLM_F, value: []}", "6:22: unknown key 'value' in 'flag'; did you mean"),
        (
            "after: other",
            "6:8: wrong type of 'after'; found the text 'other'; expected a list; write [other]",
        ),
        ("after: [f]", "6:9: the fix comes after itself"),
        ("after: [g, g]", "6:12: 'g' is there twice; remove it"),
        ("after: [g]", "6:9: there is no fix 'g'; known: f"),
        ("after: +[g]", "6:9: +[...] has no parent's list here; write [...]"),
        ("modules: {torch.x: new.py}", "6:11: this is no module of vLLM"),
        ("modules: {vllm: new.py}", "6:11: this is no module of vLLM"),
        (
            "modules: {vllm.a: new.py}",
            "7:17: the module 'vllm.a' is new and cannot be in hooks too",
        ),
        ("modules: {vllm.b: absent.py}", "6:19: absent.py: there is no such regular file"),
        (
            "modules: {vllm.b: ../f/new.py/../../x.py}",
            "6:19: the file '../f/new.py/../../x.py' leads",
        ),
        ("modules: {vllm.b: /etc/passwd}", "6:19: the file '/etc/passwd' leads out of the fix's"),
        ("modules: {vllm.b: .}", "6:19: .: there is no such regular file"),
        ("edits: {vllm.b: link.diff}", "6:17: the file 'link.diff' leads out of the fix's folder"),
        ("edits: {vllm.b: folder/x.diff}", "6:17: the file 'folder/x.diff' leads out of the fix's"),
        ("edits: {vllm.b: [b.diff]}", "6:17: wrong type of 'edits.vllm.b'; found a list; expected"),
        ("edits: {vllm.b: }", "found nothing; expected text"),
        ("reviewed: {0.32: {}}", '6:12: a key must be text, not the number 0.32; quote it: "0.32"'),
        ("reviewed: {new: {}}", "6:12: this is no release"),
        ("reviewed: {0.32.0: {vllm.b: {x: 12345678}}}", 'expected text; quote it: "12345678"'),
        ("reviewed: {0.32.0: {vllm.b: {x: 12345e78}}}", "YAML readers disagree"),
        ("reviewed: {0.32.0: {vllm.b: {x: XYZ}}}", "6:33: this is no digest; found the text 'XYZ'"),
        ("needs: [{serve: x, present: true}]", "6:9: the key 'why' is missing in 'needs.0'"),
        ("needs: [{present: true, why: x}]", "6:9: a need is about one thing"),
        ("needs: [{serve: x, env: Y, present: true, why: x}]", "6:9: a need is about one thing"),
        ("needs: [{serve: x, why: x}]", "6:9: the need asks for nothing"),
        ("needs: [{serve: x, present: false, in: [a], why: x}]", "a need for absence has no value"),
        ("needs: [{serve: x, present: false, power-of-two: true, why: x}]", "absence has no value"),
        ("needs: [{config: x, env: Y, present: true, why: x}]", "a need is about one thing"),
        ("needs: [{fits: states, at-least: 1, why: x}]", "a need for room has no value"),
        ("needs: [{fits: states, default: 1, why: x}]", "a need for room has no value"),
        ("needs: [{fits: tokens, why: x}]", "6:16: "),
        ("needs: [{config: x, power-of-two: false, why: x}]", "6:9: the need asks for nothing"),
        (
            "needs: [{serve: x, in: [[a]], why: x}]",
            "6:25: this is no value of a flag; found a list",
        ),
        ("needs: [{serve: x, at-least: '1', why: x}]", "expected a number; write 1 without quotes"),
        ("needs: [{serve: x, at_least: 1, why: x}]", "did you mean 'at-least'?"),
    ],
)
def test_refuses(fixes: Path, text: str, expected: str) -> None:
    (fixes / "f/link.diff").symlink_to("/etc/passwd")
    (fixes / "f/folder").symlink_to(fixes)
    (fixes / "x.diff").write_text("")
    (fixes / "f/fix.yaml").write_text(HEAD + text + "\n" + HOOK)
    lines = refusals(fixes)
    assert len(lines) == 1, lines
    assert lines[0].startswith("f/fix.yaml:")
    assert expected in lines[0]


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (HEAD, "1:1: the fix changes nothing; expected modules, edits or hooks"),
        (HEAD + "hooks: {}\n", "1:1: the fix changes nothing"),
        (
            HEAD + "hooks: {vllm.a: hooks.py}",
            "6:17: this is no hook; found the text 'hooks.py'; expected file.py:function",
        ),
        (
            HEAD.replace("name: f", "name: g") + HOOK,
            "2:7: the fix's name differs from its folder's; found 'g'; expected 'f'",
        ),
        (
            HEAD.replace('">=0.32.0,<0.33"', "0.32") + HOOK,
            "5:7: wrong type of 'vllm'; found the number 0.32; expected text; quote it: \"0.32\"",
        ),
        (HEAD.replace('">=0.32.0,<0.33"', '"0.32.0"') + HOOK, "5:7: this is no range"),
        ("", "1:1: the file is empty"),
        ("- a\n", "1:1: wrong type of 'the document'; found a list; expected a map"),
        ("a: 1\n---\na: 1\n", "2:1: a second YAML document begins here"),
    ],
)
def test_refuses_the_manifest(fixes: Path, manifest: str, expected: str) -> None:
    (fixes / "f/fix.yaml").write_text(manifest)
    assert refusals(fixes)[-1].startswith(f"f/fix.yaml:{expected}")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def install(module:\n", "f/hooks.py:1:12: the file has a syntax error"),
        ("def install(module):\n  return\nreturn\n", "f/hooks.py:3:1: the file has a syntax error: "
         "'return' outside function"),
        ("x = 'a\0b'\n", "f/hooks.py:1:1: the file"),
        ("x = " + "(" * 5000, "f/hooks.py:1:"),
        ("x = " + "-" * 100_000 + "1", "f/hooks.py:1:1: the file cannot be parsed"),
        ("# coding: nonsense\n", "f/hooks.py:1:"),
        ("def instal(module):\n    return {}\n", "f/hooks.py:1:1: the file has no function "
         "'install'; expected def install(module) at the top of the file; did you mean 'instal'?"),
        ("class A:\n    def install(self): ...\n", "f/hooks.py:1:1: the file has no function"),
        ("async def install(module): ...\n", "f/hooks.py:1:1: the file has no function"),
        ("\ndef install(): ...\n", "f/hooks.py:2:1: the hook 'install' cannot be called with one "
         "module; expected def install(module)"),
        ("def install(a, b): ...\n", "cannot be called with one module"),
        ("def install(a, *, b): ...\n", "cannot be called with one module"),
    ],
    ids=range(12),
)  # fmt: skip
def test_refuses_the_code_of_a_hook(fixes: Path, code: str, expected: str) -> None:
    (fixes / "f/hooks.py").write_text(code)
    assert len(refusals(fixes)) == 1
    assert expected in refusals(fixes)[0]


@pytest.mark.parametrize("arguments", ["module", "m, x=1", "*modules", "m, /, *, k=1", "m, **k"])
def test_takes_any_function_of_one_module(fixes: Path, arguments: str) -> None:
    (fixes / "f/hooks.py").write_text(f"def install({arguments}):\n    return {{}}\n")
    assert load_fixes(fixes)["f"].hooks["vllm.a"].function == "install"


def test_refuses_a_new_module_with_a_syntax_error(fixes: Path) -> None:
    make(fixes, "f", HEAD + "modules: {vllm.b: new.py}\n")
    (fixes / "f/new.py").write_text("x = 1\n  y = 2\n")
    assert refusals(fixes) == ["f/new.py:2:2: the file has a syntax error: unexpected indent"]


def test_a_hook_is_looked_at_and_not_run(fixes: Path) -> None:
    trace = fixes / "trace"
    code = f"open({str(trace)!r}, 'w')\ndef install(module): ...\n"
    (fixes / "f/hooks.py").write_text(code)
    load_fixes(fixes)
    assert not trace.exists()


def test_links_out_of_the_folders_are_refused(
    fixes: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    make(elsewhere, "g", HEAD.replace("name: f", "name: g") + HOOK)
    (fixes / "g").symlink_to(elsewhere / "g")
    assert refusals(fixes) == ["g: the fix's folder is a link out of the fixes folder"]
    (fixes / "g").unlink()
    (fixes / "g").mkdir()
    (fixes / "g/fix.yaml").symlink_to(elsewhere / "g/fix.yaml")
    assert refusals(fixes) == ["g/fix.yaml: the file is a link out of the fix's folder"]


def test_shows_the_mistakes_of_all_fixes_and_all_files(fixes: Path) -> None:
    make(fixes, "g", HEAD.replace("name: f", "name: h") + HOOK + "x: 1\nedits: {vllm.b: ../b}\n")
    (fixes / "f/hooks.py").write_text("def install(:\n")
    places = [":".join(line.split(":")[:3]) for line in refusals(fixes)]
    assert places == ["f/hooks.py:1:13", "g/fix.yaml:2:7", "g/fix.yaml:7:1", "g/fix.yaml:8:17"]


def test_two_fixes_cannot_share_a_flag(fixes: Path) -> None:
    make(fixes, "f", HEAD + HOOK + "flag: VLLM_F\n")
    make(fixes, "g", HEAD.replace("name: f", "name: g") + HOOK + "flag: VLLM_F\n")
    assert refusals(fixes) == [
        "g/fix.yaml:7:1: the flag 'VLLM_F' is that of the fix 'f' already; "
        "give each fix its own flag"
    ]


NEEDS = """\
needs:
  - {serve: speculative-config, present: true, why: it verifies drafts}
  - {serve: speculative-config.num_speculative_tokens, at-least: 1, at-most: 7, why: of the kernel}
  - {serve: pipeline-parallel-size, in: [1], default: 1, why: of the hook}
  - {serve: enforce-eager, in: [false], default: false, why: of the graph}
  - {serve: kv-transfer-config, present: false, why: of the state}
  - {env: VLLM_V2, in: ["1"], default: "0", why: the old one has no hook}
"""


@pytest.fixture
def needy(fixes: Path) -> Fix:
    make(fixes, "f", HEAD + HOOK + NEEDS)
    return load_fix(fixes / "f")


GOOD = {"speculative-config": {"num_speculative_tokens": 7}}


@pytest.mark.parametrize(
    ("serve", "env", "expected"),
    [
        (GOOD, {"VLLM_V2": "1"}, []),
        ({**GOOD, "pipeline-parallel-size": "1", "enforce-eager": False}, {"VLLM_V2": "1"}, []),
        (GOOD, {}, ["13:5: the recipe does not meet a need of the fix 'f': the environment "
                    "variable 'VLLM_V2'; found '0'; expected one of 1; because the old one has "
                    "no hook"]),
        ({}, {"VLLM_V2": "1"}, [
            "8:5: the recipe does not meet a need of the fix 'f': the serve flag "
            "'speculative-config'; found nothing; expected that it is set; because it verifies "
            "drafts",
            "9:5: the recipe does not meet a need of the fix 'f': the serve flag "
            "'speculative-config.num_speculative_tokens'; found nothing; expected at least 1 and "
            "at most 7; because of the kernel"]),
        ({"speculative-config": {"num_speculative_tokens": 8}}, {"VLLM_V2": "1"}, ["found '8'"]),
        ({"speculative-config": {"num_speculative_tokens": 0}}, {"VLLM_V2": "1"}, ["found '0'"]),
        ({"speculative-config": {"num_speculative_tokens": "x"}}, {"VLLM_V2": "1"}, ["found 'x'"]),
        ({"speculative-config": {"num_speculative_tokens": True}}, {"VLLM_V2": "1"}, ["'true'"]),
        ({**GOOD, "pipeline-parallel-size": 2}, {"VLLM_V2": "1"}, ["found '2'; expected one of 1"]),
        ({**GOOD, "enforce-eager": True}, {"VLLM_V2": "1"}, ["'true'; expected one of false"]),
        ({**GOOD, "kv-transfer-config": {}}, {"VLLM_V2": "1"}, ["expected that it is not set"]),
    ],
)  # fmt: skip
def test_needs(
    needy: Fix, serve: dict[str, object], env: dict[str, str], expected: list[str]
) -> None:
    errors = [str(error) for error in check_needs(needy, Subject(serve, env, None, None, None))[0]]
    assert len(errors) == len(expected)
    for error, part in zip(errors, expected, strict=True):
        assert part in error


def test_the_schema_agrees_with_the_loader(fixes: Path) -> None:
    def accepts(text: str) -> bool:
        document = json.loads(json.dumps(yaml.safe_load(text)))
        return not list(jsonschema.Draft202012Validator(fix_schema()).iter_errors(document))

    for file in sorted((ROOT / "fixes").glob("*/fix.yaml")):
        assert accepts(file.read_text()), file
    assert accepts(HEAD + HOOK + NEEDS + "flag: VLLM_F\n")
    assert accepts(HEAD + HOOK + "flag: {name: VLLM_F}\n")
    for bad in ("hook: {}", "flag: F", "flag: {name: F}", "after: a", "edits: {x: y}",
                "needs: [{serve: a}]", "reviewed: {'0.32.0': {vllm.b: {x: XYZ}}}"):  # fmt: skip
        make(fixes, "f", HEAD + HOOK + bad + "\n")
        assert refusals(fixes)
        assert not accepts(HEAD + HOOK + bad), bad


LINES = st.lists(
    st.sampled_from([
        "modules: {vllm.b: new.py}", "modules: [new.py]", "edits: {vllm.c: b.diff}",
        "edits: {vllm.c: 3}", "hooks: {vllm.a: [x]}", "hooks: x", "flag: {name: {}}",
        "flag: VLLM_X", "after: {a: b}",
        "after: [[f], f]", "needs: [{}]", "needs: [x]", "needs: +[{env: A, present: true, why: x}]",
        "reviewed: {'0.32.0': []}",
        "reviewed: {'0.32.0': {vllm.b: {x: 12}}}", "name: [f]", "? x",
    ]),
    max_size=8,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        LINES.map(lambda lines: "\n".join(lines).encode()),
        LINES.map(lambda lines: (HEAD + HOOK + "\n".join(lines)).encode()),
    )
)
@example((HEAD + HOOK).encode())
@example((HEAD + "hooks: {vllm.a: '\\0.py:install'}").encode())
@example((HEAD + "modules: {vllm.b: '" + "n" * 5000 + "'}").encode())
def test_any_bytes_end_in_a_fix_or_a_refusal(fixes: Path, data: bytes) -> None:
    (fixes / "f/fix.yaml").write_bytes(data)
    try:
        fix = load_fix(fixes / "f")
    except (ConfigError, ConfigErrors) as error:
        assert str(error)
    else:
        assert fix.name == "f"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.text("def install(m):\n \t\\'\"#", max_size=80).map(str.encode),
    )
)
def test_any_bytes_of_a_hook_end_in_a_fix_or_a_refusal(fixes: Path, data: bytes) -> None:
    (fixes / "f/hooks.py").write_bytes(data)
    with contextlib.suppress(ConfigError, ConfigErrors):
        load_fix(fixes / "f")
