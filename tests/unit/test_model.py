"""A model's folder is looked at before vLLM is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_overlay.errors import ConfigError
from vllm_overlay.model import find_model
from vllm_overlay.recipe import Recipe, load_recipe


def recipe(folder: Path, model: str, serve: str = "{}") -> Recipe:
    (folder / "m.yaml").write_text(
        f'schema: 1\nname: m\nsummary: s\nvllm: "0.32.0"\nmodel: {model}\nserve: {serve}\n'
    )
    return load_recipe("m", folder=folder)


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_a_bare_name_is_a_folder_of_the_models(tmp_path: Path) -> None:
    folder = fill(tmp_path / "models/tiny", "config.json", "w.safetensors", "tokenizer.json")
    assert find_model(recipe(tmp_path, "tiny"), tmp_path / "models") == str(folder)
    assert find_model(recipe(tmp_path, str(folder)), tmp_path) == str(folder)


def test_a_hub_id_is_passed_on(tmp_path: Path) -> None:
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert find_model(recipe(tmp_path, name), tmp_path) == name


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (None, "no folder"),
        ([], "an empty folder"),
        (["w.safetensors", "tokenizer.json"], "no config.json"),
        (["config.json", "tokenizer.json"], "no weights"),
        (["config.json", "w.safetensors"], "no tokenizer"),
    ],
)
def test_a_folder_that_cannot_be_served(tmp_path: Path, names: list[str] | None, says: str) -> None:
    if names is not None:
        fill(tmp_path / "models/tiny", *names)
    with pytest.raises(ConfigError) as caught:
        find_model(recipe(tmp_path, "tiny"), tmp_path / "models")
    assert says in str(caught.value) and str(caught.value).startswith(f"{tmp_path}/m.yaml:5:")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = fill(tmp_path / "models/tiny", "config.json", "a.safetensors", "tokenizer.json")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"b\.safetensors"):
        find_model(recipe(tmp_path, "tiny"), tmp_path / "models")


def test_flags_that_replace_weights_or_tokenizer_count(tmp_path: Path) -> None:
    fill(tmp_path / "models/tiny", "config.json")
    flags = "{load-format: dummy, tokenizer: other/one}"
    assert find_model(recipe(tmp_path, "tiny", flags), tmp_path / "models")
