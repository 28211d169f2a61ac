"""`recipe import`: a file of the vllm-project/recipes form becomes a recipe that loads."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.menus import LARGE, SMALL
from vllm_overlay.errors import EXIT_CONFIG, EXIT_USAGE, ConfigError, ConfigErrors
from vllm_overlay.importer import convert
from vllm_overlay.importer_write import render
from vllm_overlay.recipe import Recipe, load_recipe


class Made:
    """An imported recipe, loaded again, and what was said about it."""

    def __init__(self, folder: Path, menu: str, **options: object) -> None:
        file = folder / "menu.yaml"
        file.write_text(menu)
        given = {"name": None, "vllm": None, "hardware": (), **options}
        imported = convert(file, **given)  # type: ignore[arg-type]
        self.folder = folder
        self.file = folder / "made.yaml"
        self.text = render(imported.body, file)
        self.file.write_text(self.text)
        self.notes = [str(note).replace(f"{file}:", "") for note in imported.notes]
        self.recipe = self.variant(None)

    def variant(self, name: str | None) -> Recipe:
        return load_recipe(str(self.file), folder=self.folder, variant=name)

    def said(self, *words: str) -> str:
        """Return the one note that holds all the words."""
        (found,) = [note for note in self.notes if all(word in note for word in words)]
        return found


def refusal(folder: Path, menu: str, **options: object) -> ConfigError:
    with pytest.raises((ConfigError, ConfigErrors)) as caught:
        Made(folder, menu, **options)
    error = caught.value
    (one,) = error.errors if isinstance(error, ConfigErrors) else (error,)
    assert isinstance(one, ConfigError)
    assert "\n" not in str(one)
    return one


@pytest.fixture
def large(tmp_path: Path) -> Made:
    return Made(tmp_path, LARGE)


def test_a_small_file(tmp_path: Path) -> None:
    made = Made(tmp_path, SMALL)
    recipe = made.recipe
    assert (recipe.name, recipe.summary, recipe.vllm) == ("comet-7b", "Comet 7B", "0.30.0")
    assert recipe.model == "acme/comet-7b"
    assert recipe.serve == {"trust-remote-code": True, "tensor-parallel-size": 1}
    assert (recipe.env, recipe.fixes, recipe.variants) == ({}, (), ())
    assert made.text.startswith("# Made by `vllm-overlay recipe import` from menu.yaml\n")
    assert made.notes == [
        "2:1: not carried over: what is only for people: guide, meta.date_added, meta.slug, "
        "meta.tasks, model.architecture, variants.default.precision",
        "9:21: not carried over: 'or later' of vLLM 0.30.0: a recipe is for one release, so it "
        "pins 0.30.0; --vllm names another",
        "18:5: not carried over: variants.default.vram_minimum_gb: it is of all GPUs together: "
        "set requires.gpus and gpu-memory",
        "20:25: not carried over: what the strategy single_node_tp adds: its flags lie in "
        "another file of the collection",
    ]


def test_words_become_flags(large: Made) -> None:
    assert large.recipe.serve == {
        "trust-remote-code": True,
        "gpu-memory-utilization": "0.90",
        "block-size": 64,
        "attention-config": {"backend": "TRITON_MLA", "depth": {"a": 1, "b": 2}},
        "compilation-config": {"pass_config": {"fuse": True}},
        "enable-auto-tool-choice": True,
        "tool-call-parser": "comet",
    }
    assert large.recipe.env == {"VLLM_ENGINE_READY_TIMEOUT_S": "3600", "OMP_NUM_THREADS": "8"}
    assert large.recipe.summary == "Acme's hybrid mixture of experts"


def test_a_checkpoint_becomes_a_variant(large: Made) -> None:
    """A flag of the base that it lacks is removed; a map that lacks a key replaces the whole."""
    fp8 = large.variant("fp8")
    assert fp8.model == "acme/comet-400b-fp8"
    assert fp8.env == {**large.recipe.env, "VLLM_USE_DEEP_GEMM": "0"}
    assert fp8.serve == {
        **large.recipe.serve,
        "trust-remote-code": False,
        "attention-config": '{"backend": "FLASHMLA"}',
        "tensor-parallel-size": 8,
    }


def test_what_only_the_default_checkpoint_has_is_removed(tmp_path: Path) -> None:
    own = "  default:\n    extra_args: [--a, b]\n    extra_env: {C: d}\n"
    menu = SMALL.replace("  default:\n", own).replace(
        "    tp: 1\n", "    tp: 1\n  other: {tp: 2}\n"
    )
    made = Made(tmp_path, menu)
    assert (made.recipe.serve["a"], made.recipe.env) == ("b", {"C": "d"})
    other = made.variant("other")
    assert other.serve == {"trust-remote-code": True, "tensor-parallel-size": 2}
    assert other.env == {}


def test_features_that_are_off_become_variants(large: Made) -> None:
    assert large.recipe.variants == (
        *("fp8", "fused", "spec_decoding-mtp", "spec_decoding-drafter", "long_context"),
    )
    base = large.recipe
    mtp = large.variant("spec_decoding-mtp")
    assert mtp.serve == {
        **base.serve,
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 3},
    }
    drafter = large.variant("spec_decoding-drafter").serve["speculative-config"]
    assert drafter == {"method": "drafter", "model": "acme/comet-draft"}
    long = large.variant("long_context")
    assert long.serve == {**base.serve, "max-model-len": 2097152}
    assert long.env == {**base.env, "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


def test_a_checkpoint_may_bring_a_feature_and_a_later_vllm(large: Made) -> None:
    fused = large.variant("fused")
    assert fused.vllm == "0.33.0"
    assert fused.serve["speculative-config"] == {"method": "fused"}
    assert "speculative-config" not in large.recipe.serve


def test_a_feature_that_is_on_by_default_with_modes(tmp_path: Path) -> None:
    made = Made(tmp_path, LARGE.replace("[spec_decoding, long_context]", "[long_context]"))
    assert made.recipe.serve["speculative-config"]["method"] == "mtp"
    assert made.variant("fused").serve["speculative-config"] == '{"method": "fused"}'
    amd = Made(tmp_path, LARGE.replace("[spec_decoding, long_context]", "[]"), hardware=["amd"])
    assert amd.recipe.serve["speculative-config"]["method"] == "drafter"
    assert amd.recipe.serve["attention-backend"] == "TRITON_ATTN"


def test_chosen_hardware(tmp_path: Path) -> None:
    made = Made(tmp_path, LARGE, hardware=["hopper", "h200"])
    assert made.recipe.serve["moe-backend"] == "marlin"
    assert made.recipe.serve["max-num-seqs"] == 8, "the collection applies one GPU's first"
    assert Made(tmp_path, LARGE, hardware=["h200"]).recipe.serve["max-num-seqs"] == 16
    assert made.recipe.env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert made.variant("fp8").serve["tensor-parallel-size"] == 4
    assert made.variant("long_context").serve["max-model-len"] == 1572864
    assert not [note for note in made.notes if "hopper" in note or "h200:" in note]
    made.said("hardware_overrides.amd", "--hardware amd takes it")


def test_overrides_of_the_default_strategy(tmp_path: Path) -> None:
    menu = (
        SMALL.replace("    tp: 1\n", "")
        .replace(
            "strategy_overrides: {}",
            "strategy_overrides:\n"
            "  single_node_tp:\n"
            "    tp: 2\n"
            "    extra_args: [--a-flag, x]\n"
            "    env: {A: b}\n"
            "    hardware_overrides: {hopper: {extra_args: [--own]}}\n",
        )
        .replace(
            "hardware_overrides: {}\nstr",
            "hardware_overrides: {hopper: {extra_args: [--all]}}\nstr",
        )
    )
    plain = Made(tmp_path, menu).recipe
    assert plain.serve == {"trust-remote-code": True, "tensor-parallel-size": 2, "a-flag": "x"}
    assert plain.env == {"A": "b"}
    made = Made(tmp_path, menu, hardware=["hopper"])
    assert made.recipe.serve == {**plain.serve, "own": True}
    made.said("hardware_overrides.hopper", "strategy_overrides.single_node_tp replaces it")


def test_what_is_not_carried_over_is_said(large: Made) -> None:
    for words in (
        ("model.docker_image", "the image is yours"),
        ("uv pip install comet-kernels==1.2", "install it into the image"),
        ("features.offload", "a second process"),
        ("features.clustered", "does not offer it for single_node_tp"),
        ("features.long_context.hardware_overrides.hopper", "--hardware hopper takes it"),
        ("variants.default.hardware_overrides.h200", "--hardware h200 takes it"),
        ("variants.fp8.hardware_overrides.h200", "--hardware h200 takes it"),
        ("hardware_overrides.amd", "--hardware amd takes it"),
        ("variants.tomorrow", "a nightly build"),
        ("the strategy multi_node_tp adds", "another file"),
        ("the strategy pd_cluster adds", "another file"),
        ("strategy_overrides.pd_cluster", "that strategy"),
        ("strategy_min_gpus", "depends on the GPUs"),
        ("tensor-parallel-size", "add it to serve"),
        ("novelty", "does not know the key"),
        ("'or later' of vLLM 0.31.0", "pins 0.31.0"),
        ("only for people", "guide"),
    ):
        large.said(*words)
    assert all(note.split(":")[0].isdigit() for note in large.notes), "each has its place"
    assert len(large.notes) == len(set(large.notes))


def test_every_value_arrives_or_is_said(large: Made) -> None:
    """Each word of the file's lists is in the recipe, or its list is in a note."""
    for word in ("comet-kernels", "marlin", "TRITON_ATTN"):
        assert word not in large.text
    for word in ("comet", "0.90", "FLASHMLA", "acme/comet-draft", "2097152", "VLLM_USE_DEEP_GEMM"):
        assert word in large.text


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


def test_names(tmp_path: Path) -> None:
    assert Made(tmp_path, SMALL, name="mine").recipe.name == "mine"
    assert (
        Made(tmp_path, SMALL.replace('"comet-7b"\n  date', '"no name"\n  date')).recipe.name
        == "menu"
    )
    error = refusal(tmp_path, SMALL, name="a/b")
    assert error.exit_code == EXIT_USAGE


def test_the_release_is_the_files_or_the_users(tmp_path: Path) -> None:
    made = Made(tmp_path, LARGE, vllm="0.32.0")
    assert made.recipe.vllm == "0.32.0"
    assert made.recipe.variants[:2] == ("fp8", "tomorrow")
    assert made.variant("tomorrow").vllm == "0.32.0"
    made.said("variants.fused", "a later vLLM than --vllm")
    nightly = 'min_vllm_version: "0.30.0"\n  nightly_required: true'
    menu = SMALL.replace('min_vllm_version: "0.30.0"', nightly)
    made = Made(tmp_path, menu, vllm="0.30.0")
    made.said("the wish for a nightly build", "the recipe pins 0.30.0")


@pytest.mark.parametrize(
    ("old", "new", "vllm", "said"),
    [
        ('min_vllm_version: "0.30.0"', "", None, "which release of vLLM to pin; found no version"),
        ("architecture: dense", "nightly_required: true", None, "found at least 0.30.0; expected"),
        ("", "", "0.29.0", "--vllm 0.29.0 is too old for this file; found at least 0.30.0"),
        ("", "", "new", "--vllm is no release; found new"),
    ],
)
def test_no_release_is_wrong_usage(
    tmp_path: Path, old: str, new: str, vllm: str | None, said: str
) -> None:
    error = refusal(tmp_path, SMALL.replace(old, new), vllm=vllm)
    assert said in str(error)
    assert error.exit_code == EXIT_USAGE


def test_hardware_that_the_file_does_not_know_is_wrong_usage(tmp_path: Path) -> None:
    error = refusal(tmp_path, LARGE, hardware=["hooper"])
    assert error.exit_code == EXIT_USAGE
    assert str(error) == (
        "the file has no overrides for this hardware; found hooper; "
        "expected of the file's: amd, h200, hopper"
    )


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


def test_a_feature_whose_modes_are_for_other_checkpoints(tmp_path: Path) -> None:
    for mode in ("mtp", "drafter"):
        assert f"      {mode}:\n" in LARGE
    menu = LARGE.replace("      mtp:\n", "      mtp:\n        variants: [fp8]\n").replace(
        "      drafter:\n", "      drafter:\n        variants: [fp8]\n"
    )
    made = Made(tmp_path, menu)
    assert made.recipe.variants == ("fp8", "fused", "long_context")
    made.said("features.spec_decoding:", "no mode of it is for this checkpoint")


def test_a_feature_never_takes_a_checkpoints_name(tmp_path: Path) -> None:
    made = Made(tmp_path, LARGE.replace("  tomorrow:", "  long_context:"), vllm="0.33.0")
    assert made.variant("long_context").model == "acme/comet-400b-next"
    made.said("features.long_context:", "a variant has its name")


def test_a_default_strategy_that_lies_elsewhere(tmp_path: Path) -> None:
    menu = LARGE.replace("strategy_min_gpus: 8", "default_strategy: multi_node_tp")
    made = Made(tmp_path, menu)
    made.said("default_strategy multi_node_tp", "another file")
    assert made.recipe.serve["enable-x"] is True
    assert "tensor-parallel-size" not in made.variant("fp8").serve


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


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "menu.yaml").write_text(LARGE)
    command = [str(Path(sys.executable).parent / "vllm-overlay"), "recipe", "import", "menu.yaml"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True)
        assert all(line.startswith("vllm-overlay: ") for line in done.stderr.splitlines())
        return done

    printed = run("--vllm", "0.33.0", "--hardware", "h200", "--hardware", "hopper")
    assert printed.returncode == 0
    assert "moe-backend: marlin" in printed.stdout
    assert len(printed.stderr.splitlines()) > 10
    written = run("-o", "recipes-comet.yaml", "--vllm", "0.33.0")
    assert (written.returncode, written.stdout) == (0, "")
    recipe = load_recipe(str(tmp_path / "recipes-comet.yaml"), folder=tmp_path)
    assert (recipe.name, recipe.vllm) == ("recipes-comet", "0.33.0")
    again = run("-o", "recipes-comet.yaml")
    assert (again.returncode, again.stdout) == (EXIT_CONFIG, "")
    assert again.stderr == (
        "vllm-overlay: recipes-comet.yaml: the file is there already; "
        "remove it first, or give another\n"
    )
    assert run("--vllm", "0.1").returncode == EXIT_USAGE
    assert run("-o", "no/folder.yaml").returncode == EXIT_CONFIG
