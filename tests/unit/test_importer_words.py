"""`recipe import`, word by word: every value of a file arrives, or a line says why not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.menus import LARGE, SMALL, Made, refusal
from vllm_overlay.errors import EXIT_CONFIG, ConfigError, ConfigErrors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("[-tp, '8']", "not carried over: -tp: a short option"),
        ("[stray]", "not carried over: stray: it belongs to no flag"),
        ("[--api-key, sesame]", "--api-key: the serve flag 'api-key' is a secret; set"),
        ("[--hf-token=sesame]", "--hf-token: the serve flag 'hf-token' is a secret; set"),
        ("[--model, other]", "--model: the serve flag 'model' has no place in a recipe"),
        ("[--config, f.yaml]", "--config: the serve flag 'config' has no place in a recipe"),
        ("[--master-addr, $HEAD_IP]", "--master-addr: its value names a shell variable"),
        ("['--x.y+', a]", "--x.y+: a part of a flag with no single value"),
        ("[--Loud, a]", "--Loud: this is no serve flag"),
    ],
)
def test_words_that_a_recipe_cannot_hold(tmp_path: Path, words: str, said: str) -> None:
    made = Made(tmp_path, SMALL.replace('["--trust-remote-code"]', words))
    assert made.recipe.serve == {"tensor-parallel-size": 1}
    assert said in made.said("11:")
    assert "sesame" not in made.text + "".join(made.notes)


@pytest.mark.parametrize(
    ("words", "serve"),
    [
        ("[--sizes, '1', '-2', '3']", {"sizes": [1, -2, 3]}),
        ("[--a, '1', --a, '2']", {"a": 2}),
        ("[--x, --no-x]", {"x": False}),
        ("['--no-x', a]", {"no-x": "a"}),
        ("['--a={\"b\": [1, 2.5, null, true]}']", {"a": {"b": [1, 2.5, None, True]}}),
        ("[--a, '{\"b\": 1, \"b\": 2}']", {"a": '{"b": 1, "b": 2}'}),
        ("[--a, '{{ not json }}']", {"a": "{{ not json }}"}),
        ("[--a, '007', --b, 1.10, --c, 'yes']", {"a": "007", "b": "1.10", "c": "yes"}),
        ("[--a, '']", {"a": ""}),
        ("[--a, '0o17', --b, 1e3, --c, '~']", {"a": "0o17", "b": "1e3", "c": "~"}),
        ('[--a, "x\\Ly"]', {"a": "x\u2028y"}),
        ("[--a, '{\"b\": 1}', --a.c.d, 'true', --a.e=f]",
         {"a": {"b": 1, "c": {"d": True}, "e": "f"}}),
        ("['--a=b c', '--d e f']", {"a": "b c", "d": "e f"}),
        ("[--a, \"x\\ty\\nz\"]", {"a": "x\ty\nz"}),
    ],
)  # fmt: skip
def test_words_of_every_kind(tmp_path: Path, words: str, serve: dict[str, object]) -> None:
    made = Made(tmp_path, SMALL.replace('["--trust-remote-code"]', words).replace("tp: 1", ""))
    assert made.recipe.serve == serve


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("HF_TOKEN: sesame", "HF_TOKEN: the variable 'HF_TOKEN' looks like a secret; set HF_TOKEN"),
        ("VLLM_CACHE_ROOT: sesame", "VLLM_CACHE_ROOT: the variable 'VLLM_CACHE_ROOT' is set by"),
        ("A: true", "the variable A: it is no text"),
        ("A: 1.50", "the variable A: it is no text"),
        ("A: 0x10", "the variable A: it is no text"),
        ("A: $HOME/x", "the variable A: it names a shell variable"),
        ("'A B': c", "the variable A B: this is no environment variable"),
    ],
)
def test_variables_that_a_recipe_cannot_hold(tmp_path: Path, variable: str, said: str) -> None:
    made = Made(tmp_path, SMALL.replace("base_env: {}", f"base_env: {{{variable}}}"))
    assert made.recipe.env == {}
    assert said in made.said("12:")
    assert "sesame" not in made.text + "".join(made.notes)


@pytest.mark.parametrize(
    ("menu", "said"),
    [
        ("", "the file is empty"),
        ("a: b\n", "1:1: this is no file of the vllm-project/recipes form"),
        ("- a\n", "1:1: this is no file of the vllm-project/recipes form"),
        ("text", "1:1: this is no file of the vllm-project/recipes form"),
        (SMALL + "model: {}\n", "the key 'model' is there twice; the first is in line 7"),
        (SMALL + "a: [", "this is not valid YAML"),
        (SMALL + "--- a\n", "this is not valid YAML"),
        (SMALL + "a: \x01\n", "this is not valid YAML"),
        (SMALL + "? [a]\n: b\n", "a key must be text"),
        (SMALL.replace("tasks: [text]", "tasks: [omni]"), "6:10: this is a recipe of vLLM-Omni"),
        (SMALL + "omni: {}\n", "6:10: this is a recipe of vLLM-Omni"),
        (SMALL.replace("features: {}", "features: [a]"), "13:11: this must be a map; found a list"),
        (SMALL.replace("[single_node_tp]", "x"), "20:24: this must be a list; found x"),
        (SMALL.replace('"0.30.0"', "soon"), "9:21: this is no version; found soon"),
        (SMALL.replace("acme/comet-7b", "../x"), "would not load: the model's path leaves"),
        (SMALL + "x: &a [*a]\n", "the document is too large; expected up to 32 levels"),
        (SMALL + "x: " + "[" * 5000, "nested too deeply"),
        ("x: &a {<<: *a}\n", "the document is too large"),
        (SMALL + "x: {<<: 1}\n", "only a map can be merged"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, menu: str, said: str) -> None:
    error = refusal(tmp_path, menu)
    assert said in str(error)
    assert str(tmp_path / "menu.yaml") in str(error)
    assert error.exit_code == EXIT_CONFIG


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, LARGE.count("\n")),
    st.sampled_from(["", "- a", "x: {}", "[]", "  - --a", "~", "? ", "<<: 1", "  args: {}", "\t"])
    | st.text(max_size=20),
)
def test_any_file_is_a_recipe_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, line: int, put: str
) -> None:
    lines = LARGE.split("\n")
    lines[line : line + 1] = [put]
    menu = "\n".join(lines).encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    with suppress(ConfigError, ConfigErrors):
        Made(tmp_path_factory.mktemp("any"), menu)


def test_aliases_cannot_explode(tmp_path: Path) -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 12))
    error = refusal(tmp_path, f"l0: &l0 [a]\n{levels}{SMALL}")
    assert "too large; expected up to 20000 values" in str(error)


def test_merge_keys_are_written_out(tmp_path: Path) -> None:
    menu = SMALL.replace("base_env: {}", "base_env: {<<: [*e, *f], B: own}")
    made = Made(tmp_path, f"x: &e {{A: first}}\ny: &f {{A: second, B: c, C: d}}\n{menu}")
    assert made.recipe.env == {"A": "first", "B": "own", "C": "d"}
