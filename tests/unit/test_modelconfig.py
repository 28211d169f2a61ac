"""Reading a config.json: what is taken, and the one line for what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.models import GLM, glm, safetensors, write_model
from vllm_overlay.errors import ConfigError
from vllm_overlay.hybridmodel import hybrid_shape
from vllm_overlay.modelconfig import ABSENT, ModelConfig, read_model_config
from vllm_overlay.weights import read_shard, shard_names, weight_bytes


def refusal(folder: Path, text: str | bytes | None) -> str:
    if text is not None:
        data = text if isinstance(text, bytes) else text.encode()
        (folder / "config.json").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_model_config(folder)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "config.json: there is no such regular file"),
        ("[1]", "config.json: config.json is no JSON object; expected {…}; fetch the model again"),
        ('{\n"a": }', "config.json:2:6: config.json is no JSON: Expecting value; fetch"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "config.json: config.json has the key 'c' twice"),
        (b'{"a": "\xff"}', "config.json: config.json is no JSON"),
        ("[" * 100_000, "config.json: config.json is no JSON"),
    ],
)
def test_a_broken_config_is_refused_in_one_line(
    tmp_path: Path, text: str | bytes | None, line: str
) -> None:
    assert refusal(tmp_path, text).startswith(line)
    assert "\n" not in refusal(tmp_path, text)


def test_values_are_found_by_path_and_overrides_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"a": {"b": 1, "c": 2}, "d": null, "e": [1], "g": [Infinity]}'
    )
    config = read_model_config(tmp_path, {"a": {"b": 3}, "f": 4})
    assert [config.get(path) for path in ("a.b", "a.c", "f", "e")] == [3, 2, 4, [1]]
    assert [config.get(path) for path in ("d", "a.x", "e.0", "a.b.c")] == [ABSENT] * 4


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ({"num_hidden_layers": None}, "no usable 'text_config.num_hidden_layers'; found nothing"),
        ({"num_hidden_layers": True}, "found true; expected a whole number of at least 1"),
        ({"linear_num_heads": "64"}, 'found "64"; expected a whole number'),
        ({"linear_head_dim": 0}, "found 0"),
        ({"layer_types": [1]}, "no usable 'text_config.layer_types'"),
    ],
)
def test_a_config_that_lacks_a_size_names_it(text: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hybrid_shape(ModelConfig(Path("c.json"), glm(**text)))
    assert str(caught.value).startswith("c.json: the model's config has") and part in str(
        caught.value
    )


def test_a_model_of_another_family_has_no_hybrid_shape() -> None:
    assert hybrid_shape(ModelConfig(Path("c"), {"model_type": "llama"})) is None


def test_layers_are_counted_as_transformers_fills_them_in() -> None:
    shape = hybrid_shape(ModelConfig(Path("c"), glm(layer_types=None)))
    assert shape is not None
    assert (shape.state_layers, shape.attention_layers, shape.draft_layers) == (6, 2, 1)


def test_kimi_counts_its_layers_from_one() -> None:
    linear = {"kda_layers": [1, 2, 4, 5], "num_heads": 8, "head_dim": 64}
    text = {
        "num_hidden_layers": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {**linear, "short_conv_kernel_size": 4},
    }
    shape = hybrid_shape(ModelConfig(Path("c"), {"model_type": "kimi_k3", "text_config": text}))
    assert shape is not None
    assert (shape.state_layers, shape.attention_layers, shape.latent) == (3, 1, 576)
    text["linear_attn_config"] = {**linear, "kda_layers": "all"}
    with pytest.raises(ConfigError, match=r"linear_attn_config\.kda_layers'; found \"all\""):
        hybrid_shape(ModelConfig(Path("c"), {"model_type": "kimi_linear", **text}))


def test_weights_are_counted_by_their_headers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    assert weight_bytes(folder) == 1000
    (folder / "other.safetensors").write_bytes(safetensors({"x": 7}))
    assert weight_bytes(folder) == 1000  # not in the index
    (folder / "model.safetensors.index.json").unlink()
    assert weight_bytes(folder) == 1007


def test_a_file_that_ends_early_is_seen_by_its_header(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(safetensors({"a": 100}, cut=30))
    assert (read_shard(file).data, read_shard(file).missing) == (100, 30)
    file.write_bytes(safetensors({"a": 100}, cut=0))
    assert read_shard(file).missing == 0


@pytest.mark.parametrize(
    "data", [b"", b"1234", b"\xff" * 8, safetensors({"a": 1})[:20], b"\2" + bytes(7) + b"[]"]
)
def test_a_broken_header_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="no safetensors file, or only its beginning"):
        read_shard(file)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": {"a": "../x"}}', '{"weight_map": 1}'])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match="the index of the weights cannot be used"):
        shard_names(tmp_path)


def test_the_test_s_own_config_is_json() -> None:
    assert json.loads(json.dumps(GLM)) == GLM
