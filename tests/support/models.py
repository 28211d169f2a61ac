"""Model folders of a test: a config.json, weights of a few bytes, a tokenizer."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

# GLM-5.3-Flash cut down to 8 layers: 6 with a state, 2 with attention, 1 more of its draft head.
GLM: dict[str, Any] = {
    "model_type": "glm5_next",
    "dtype": "bfloat16",
    "text_config": {
        "num_hidden_layers": 8,
        "layer_types": (["linear_attention"] * 3 + ["deepseek_sparse_attention"]) * 2,
        "num_nextn_predict_layers": 1,
        "linear_num_heads": 64,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 0,
        "index_head_dim": 128,
        "index_kpool": 16,
        "max_position_embeddings": 65536,
    },
}


def glm(**text: Any) -> dict[str, Any]:
    """Return GLM's config.json with other values in its text_config; None leaves one out."""
    values = {**GLM["text_config"], **text}
    return {**GLM, "text_config": {k: v for k, v in values.items() if v is not None}}


def safetensors(tensors: dict[str, int], *, cut: int = 0) -> bytes:
    """Return a file of 8-bit tensors with these sizes, without its last ``cut`` bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, size in tensors.items():
        offsets = [start, start + size]
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": offsets}
        start += size
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(start)
    return data[: len(data) - cut]


def write_model(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """Write a whole model folder: two shards of 600 and 400 bytes of tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(GLM if config is None else config))
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    (folder / names[0]).write_bytes(safetensors({"a": 500, "b": 100}))
    (folder / names[1]).write_bytes(safetensors({"c": 400}))
    weight_map = {"a": names[0], "b": names[0], "c": names[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder
