"""`recipe import`: a file of the vllm-project/recipes form becomes a recipe that loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.menus import LARGE, SMALL, Made, refusal
from vllm_overlay.errors import EXIT_CONFIG, EXIT_USAGE
from vllm_overlay.recipe import load_recipe


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
    assert made.recipe.env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert made.variant("fp8").serve["tensor-parallel-size"] == 4
    assert made.variant("long_context").serve["max-model-len"] == 1572864
    assert not [note for note in made.notes if "hopper" in note or "h200:" in note]
    made.said("hardware_overrides.amd", "--hardware amd takes it")
    assert Made(tmp_path, LARGE, hardware=["h200"]).recipe.serve["max-num-seqs"] == 16


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
