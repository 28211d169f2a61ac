"""Rules about a model's config.json and about room for its states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.desk import Desk
from tests.support.models import GLM, glm, write_model
from vllm_overlay.capacity import Capacity, KvMemory, capacity, kv_memory, sum_lines
from vllm_overlay.errors import ConfigError
from vllm_overlay.fix import Fix, check_needs, load_fix
from vllm_overlay.hybridmodel import hybrid_shape
from vllm_overlay.hybridrank import NotCoveredError
from vllm_overlay.modelconfig import ModelConfig
from vllm_overlay.needs import Subject

GIB = 2**30
MTP = {"speculative-config": {"method": "mtp", "num_speculative_tokens": 7}}
STOCK = {**MTP, "tensor-parallel-size": 4, "kv-cache-memory-bytes": GIB, "max-num-seqs": 64}
KDA = "text_config.linear_head_dim"


def result(
    serve: dict[str, Any], config: dict[str, Any] = GLM, *, one_state: bool = False
) -> Capacity:
    shape = hybrid_shape(ModelConfig(Path("c"), config))
    assert shape is not None
    return capacity(shape, serve, recoverssm=one_state, memory=kv_memory(serve, None, None))


def test_the_sum_is_shown_line_by_line() -> None:
    assert sum_lines(result(STOCK)) == (
        "one state: 122,880 B of convolution + 1,048,576 B recurrent = 1,171,456 B a layer and "
        "GPU, in a page of 1,572,864 B",
        "one block: 1,536 tokens, 4,757,504 B over all layers",
        "one request: 2 groups x 8 states (1 + 7 for drafts) + 1 block of the indexer + 1 x 1 "
        "block of attention = 18 blocks",
        "at its peak up to 2 states more a group for prefix caching: 22 blocks",
        "the KV cache: 1,073,741,824 B (kv-cache-memory-bytes) / 4,757,504 B - 1 kept back = 224",
        "so 12 requests' states fit, 10 all at their peak; max-num-seqs is 64",
        "of 65,536 tokens each (64 blocks): 3 requests",
    )
    one = result(STOCK, one_state=True)
    assert (one.requests(), one.requests(peak=False)) == (28, 56)
    flat = sum_lines(result({**STOCK, "enable-prefix-caching": False}))
    assert flat[4] == "so 12 requests' states fit; max-num-seqs is 64"
    lines = sum_lines(result({**MTP, "max-model-len": "2K"}))
    assert len(lines) == 4 and not any("fit" in line for line in lines)


def test_a_bound_and_an_unset_flag_are_said() -> None:
    shape = hybrid_shape(ModelConfig(Path("c"), glm(max_position_embeddings=None)))
    assert shape is not None
    memory = kv_memory({"gpu-memory-utilization": 0.5}, 2 * GIB, GIB // 2)
    assert memory == KvMemory(GIB // 2, None, "0.5 of the GPU less the weights", bound=True)
    *_, line = sum_lines(capacity(shape, {}, recoverssm=False, memory=memory))
    assert line == (
        "so at most 11 requests' states fit, 5 all at their peak; "
        "max-num-seqs is not set, and vLLM takes at least 256"
    )
    blocks = kv_memory({"num-gpu-blocks-override": 100, "kv-cache-memory-bytes": 1}, None, None)
    shown = sum_lines(capacity(shape, {}, recoverssm=False, memory=blocks))
    assert "the KV cache: 100 blocks (num-gpu-blocks-override) - 1 kept back = 99" in shown


def test_a_draft_model_of_its_own_is_said_not_to_be_counted() -> None:
    draft = {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}
    found = result({"speculative-config": draft})
    assert found.notes == ("the draft model's own KV cache is not counted (method 'eagle3')",)
    own = result({"speculative-config": {"method": "mtp"}})  # vLLM drafts what the head predicts
    assert own.window == 2
    assert own.token_bytes == result(MTP).token_bytes == found.token_bytes // 2 * 3


@pytest.mark.parametrize(
    ("serve", "capability", "expected"),
    [
        ({}, None, (147_456, 4_194_304, 2, 2 * 1033)),
        ({}, "9.0", (147_456, 4_194_304, 2, 2 * 1033)),
        ({}, "8.9", (147_456, 4_194_304, 1, 2 * 1033)),  # no fused prefill kernel
        ({}, "10.0", (147_456, 4_194_304, 2, 2 * 521)),  # an fp8 cache by default
        ({}, "12.0", (147_456, 4_194_304, 2, 2 * 665)),  # vLLM's packed fp8 format
        ({"kv-cache-dtype": "fp8"}, "9.0", (147_456, 4_194_304, 2, 2 * 665)),
        ({"kv-cache-dtype": "fp8"}, "10.0", (147_456, 4_194_304, 2, 2 * 521)),
        ({"kv-cache-dtype": "float16"}, "12.0", (147_456, 4_194_304, 2, 2 * 1033)),
        ({"dtype": "float16"}, "9.0", (147_456, 4_194_304, 1, 2 * 1033)),
        ({"mamba-cache-dtype": "float32"}, "9.0", (294_912, 4_194_304, 2, 2 * 1033)),
        ({"mamba-ssm-cache-dtype": "bfloat16"}, "9.0", (147_456, 2_097_152, 2, 2 * 1033)),
        ({"additional-config": {"kda_prefill_backend": "triton"}}, "9.0",
         (147_456, 4_194_304, 1, 2 * 1033)),
        ({"tensor-parallel-size": 64}, "9.0", (2_304, 65_536, 2, 2 * 1033)),
        ({"enable-prefix-caching": False}, "9.0", (147_456, 4_194_304, 0, 2 * 1033)),
        ({"mamba-cache-mode": "align"}, "9.0", (147_456, 4_194_304, 2, 2 * 1033)),
    ],
)  # fmt: skip
def test_what_the_flags_and_the_gpu_change(
    serve: dict[str, Any], capability: str | None, expected: tuple[int, int, int, int]
) -> None:
    shape = hybrid_shape(ModelConfig(Path("c"), GLM))
    assert shape is not None
    found = capacity(shape, serve, recoverssm=False, capability=capability)
    assert (found.conv, found.recurrent, found.align_slots, found.token_bytes) == expected


def test_kimi_s_own_recoverssm_keeps_one_state() -> None:
    text = {
        "num_hidden_layers": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "num_heads": 8,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    }
    kimi = {"model_type": "kimi_k3", "text_config": text}
    draft = {"speculative-config": {"method": "ngram", "num_speculative_tokens": 3}}
    assert result(draft, kimi).draft_slots == 3
    assert result({**draft, "use-replayssm": True}, kimi).draft_slots == 0


@pytest.mark.parametrize(
    ("serve", "says"),
    [
        ({"pipeline-parallel-size": 2}, "pipeline-parallel-size above 1"),
        ({"decode-context-parallel-size": 2}, "decode-context-parallel-size above 1"),
        ({"tensor-parallel-size": 3}, "64 heads of linear attention over tensor-parallel-size 3"),
        ({"mamba-cache-mode": "all"}, "mamba-cache-mode all"),
        ({"mamba-ssm-cache-dtype": "float16"}, "mamba-ssm-cache-dtype float16"),
        ({"kv-cache-dtype": "nvfp4"}, "kv-cache-dtype nvfp4"),
        ({"dtype": "int8"}, "dtype int8"),
        ({"speculative-config": {"method": "ngram"}}, "without num_speculative_tokens"),
        ({"block-size": "many"}, "block-size many"),
    ],
)
def test_what_the_arithmetic_does_not_cover_is_said(serve: dict[str, Any], says: str) -> None:
    with pytest.raises(NotCoveredError, match=says):
        result(serve)


def needs(desk: Desk, *rules: dict[str, Any]) -> None:
    desk.fix("f", needs=[{**rule, "why": "of the kernel"} for rule in rules])


def found(desk: Desk, model: str = "m", **serve: Any) -> tuple[list[str], tuple[str, ...]]:
    """Return the errors about needs, and the plan's notes."""
    resolution = desk.resolve(model=model, fixes=["f"], serve=serve)
    errors = [str(error) for error in resolution.errors]
    return [e for e in errors if "a need" in e or "config" in e], resolution.plan.notes


@pytest.mark.parametrize(
    ("size", "rule", "expected"),
    [
        (128, {"power-of-two": True}, None),
        (96, {"power-of-two": True}, "a power of two"),
        (0, {"power-of-two": True}, "a power of two"),
        (128, {"at-least": 256}, "at least 256"),
        (128, {"in": [64, 256], "power-of-two": True}, "one of 64, 256 and a power of two"),
        (None, {"present": True}, "that it is set"),
        (None, {"power-of-two": True, "default": 128}, None),
        (128, {"present": False}, "that it is not set"),
    ],
)
def test_a_rule_about_the_model_s_config(
    desk: Desk, size: int | None, rule: dict[str, Any], expected: str | None
) -> None:
    write_model(desk.folder / "models/m", glm(linear_head_dim=size))
    needs(desk, {"config": KDA, **rule})
    errors, notes = found(desk)
    assert notes == ()
    if expected is None:
        assert errors == []
        return
    (line,) = errors
    assert line.startswith(f"{desk.folder}/fixes/f/fix.yaml:")
    what = "the model does not meet a need of the fix 'f': the value"
    assert f"{what} '{KDA}' of {desk.folder}/models/m/config.json; found " in line
    assert f"; expected {expected}; because of the kernel" in line


def test_a_model_that_is_not_here_yet_is_a_note_of_the_plan(desk: Desk) -> None:
    needs(desk, {"config": KDA, "power-of-two": True}, {"fits": "states"})
    errors, notes = found(desk, "org/m")
    why = "the model's config.json is not on this machine yet"
    assert errors == []
    assert notes == (
        f"f: '{KDA}' is checked only at start-up: {why}",
        f"f: 'fits: states' is checked only at start-up: {why}",
    )


def test_a_broken_config_stops_a_recipe_whose_fix_has_a_rule_about_it(desk: Desk) -> None:
    write_model(desk.folder / "models/m")
    (desk.folder / "models/m/config.json").write_text("{")
    needs(desk, {"config": KDA, "power-of-two": True})
    (line,) = found(desk)[0]
    assert line.startswith(f"{desk.folder}/models/m/config.json:1:2: config.json is no JSON")


@pytest.mark.parametrize(("kind", "fit", "blocks"), [("states", 12, 18), ("one-state", 56, 4)])
def test_the_states_of_all_requests_must_fit(desk: Desk, kind: str, fit: int, blocks: int) -> None:
    write_model(desk.folder / "models/m")
    needs(desk, {"fits": kind})
    pinned = {**MTP, "tensor-parallel-size": 4, "kv-cache-memory-bytes": GIB}
    assert found(desk, **pinned, **{"max-num-seqs": fit}) == ([], ())
    (line,) = found(desk, **pinned, **{"max-num-seqs": fit + 1})[0]
    assert (
        f"found room for {fit} (224 blocks, {blocks} a request); expected for {fit + 1}; "
        f"because of the kernel; set max-num-seqs to at most {fit}, or give more KV memory"
    ) in line
    (line,) = found(desk, **pinned)[0]
    assert "expected for 256 (vLLM's least default: max-num-seqs is not set)" in line


def test_a_block_must_hold_a_step(desk: Desk) -> None:
    write_model(desk.folder / "models/m", glm(linear_num_heads=1))
    needs(desk, {"fits": "one-state"})
    long = {"speculative-config": {"method": "ngram", "num_speculative_tokens": 550}}
    pinned = {"kv-cache-memory-bytes": GIB, "max-num-seqs": 1}
    (line,) = found(desk, **long, **pinned)[0]
    assert "found blocks of 512 tokens; expected at least 1 + num_speculative_tokens, 551" in line
    assert found(desk, **long, **pinned, **{"enable-prefix-caching": False}) == ([], ())


def test_room_that_nothing_tells_is_a_note(desk: Desk) -> None:
    write_model(desk.folder / "models/m")
    needs(desk, {"fits": "states"})
    (note,) = found(desk, **MTP)[1]
    assert note.endswith("neither kv-cache-memory-bytes nor the GPU tells the room")
    (note,) = found(desk, **{"pipeline-parallel-size": 2})[1]
    assert note.endswith("the arithmetic does not cover pipeline-parallel-size above 1")


def test_a_model_without_states_is_refused(desk: Desk) -> None:
    write_model(desk.folder / "models/m", {"model_type": "llama"})
    needs(desk, {"fits": "states"})
    (line,) = found(desk)[0]
    assert "it has states; found the model_type 'llama' in" in line


BOUND = """\
schema: 1
name: f
summary: x
source: x
flag: {name: VLLM_F, values: ["0", "1", "fast"]}
vllm: ==0.33.0
modules: {vllm.b: new.py}
needs:
  - {serve: kv-transfer-config, present: false, when: [WHEN], why: of the pending tokens}
"""


def bound(folder: Path, when: str) -> Fix:
    (folder / "f").mkdir(exist_ok=True)
    (folder / "f" / "new.py").write_text("")
    (folder / "f" / "fix.yaml").write_text(BOUND.replace("WHEN", when))
    return load_fix(folder / "f")


@pytest.mark.parametrize(
    ("when", "env", "met"),
    [
        ("fast", {"VLLM_F": "fast"}, False),
        ("fast", {"VLLM_F": "1"}, True),
        ("fast", {}, True),  # the default is 1
        ("'1'", {}, False),
        ("'1', fast", {"VLLM_F": "fast"}, False),
        ("", {"VLLM_F": "fast"}, False),
    ],
)
def test_a_need_of_one_value_of_the_flag(
    tmp_path: Path, when: str, env: dict[str, str], met: bool
) -> None:
    subject = Subject({"kv-transfer-config": {}}, env, None, None, None)
    errors, _ = check_needs(bound(tmp_path, when), subject)
    assert ["kv-transfer-config" in str(error) for error in errors] == [True] * (not met)


@pytest.mark.parametrize("value", ["'0'", "flush"])
def test_a_need_of_a_value_that_the_flag_does_not_have(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bound(tmp_path, value)
    assert "fix.yaml:9:56: the need is bound to a value" in str(caught.value)
    assert "expected 1 or fast" in str(caught.value)
