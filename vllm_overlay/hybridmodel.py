"""What a config.json says of a hybrid model: layers with a recurrent state, and with a KV cache.

Two families, both with Kimi Delta Attention (KDA) and latent attention (MLA), as vLLM 0.33.0 reads
them: GLM-5.3-Flash (vllm/models/glm5next) and Kimi-Linear with Kimi-K3 (vllm/models/kimi_k3).
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_overlay.modelconfig import ABSENT, ModelConfig

GLM = "glm5next"
KIMI = "kimi"
FAMILIES = {"glm5_next": GLM, "kimi_linear": KIMI, "kimi_k3": KIMI}
SCALE_GROUP = 128  # values of an indexer key that share one 4-byte scale


@dataclass(frozen=True)
class Indexer:
    """The sparse attention's own cache: one 8-bit key with scales for ``pool`` tokens."""

    head_size: int
    pool: int

    @property
    def entry(self) -> int:
        """Bytes of one entry."""
        return self.head_size + self.head_size // SCALE_GROUP * 4


@dataclass(frozen=True)
class HybridShape:
    """The shape of a hybrid model's caches; sizes are of the whole model, not of a rank.

    ``latent`` is the number of values that one attention layer keeps a token, ``draft_layers``
    the attention layers of the model's own draft head, and ``checkpoints`` whether the fused
    prefill kernel, where the GPU has it, keeps one more state a request.
    """

    family: str
    state_layers: int
    attention_layers: int
    draft_layers: int
    heads: int
    head_size: int
    conv_width: int
    latent: int
    indexer: Indexer | None
    checkpoints: bool
    dtype: str
    max_model_len: int | None


def hybrid_shape(config: ModelConfig) -> HybridShape | None:
    """Return the shape of a model of a known family; None for any other model.

    Raises ConfigError for a config of a known family that lacks what vLLM needs.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    text = "" if config.get("text_config") is ABSENT else "text_config."
    return _glm(config, text) if family == GLM else _kimi(config, text)


def _glm(config: ModelConfig, text: str) -> HybridShape:
    layers = config.whole(f"{text}num_hidden_layers")
    if config.get(f"{text}layer_types") is ABSENT:
        states = sum(index % 4 != 3 for index in range(layers))  # as transformers fills it in
    else:
        types = config.texts(f"{text}layer_types")
        states = types[:layers].count("linear_attention")
    section = config.values["text_config"] if text else config.values
    pool = config.whole(f"{text}index_kpool", least=2, default=16)
    return HybridShape(
        family=GLM,
        state_layers=states,
        attention_layers=layers - states,
        draft_layers=config.whole(f"{text}num_nextn_predict_layers", least=0, default=0),
        heads=config.whole(f"{text}linear_num_heads", default=64),
        head_size=config.whole(f"{text}linear_head_dim", default=128),
        conv_width=config.whole(f"{text}linear_conv_kernel_dim", default=4),
        latent=_latent(config, text),
        indexer=Indexer(config.whole(f"{text}index_head_dim", default=128), pool),
        checkpoints=section.get("linear_lower_bound", -5.0) is not None,  # null: no bounded gate
        dtype=_dtype(config, text),
        max_model_len=_max_model_len(config, text),
    )


def _kimi(config: ModelConfig, text: str) -> HybridShape:
    layers = config.whole(f"{text}num_hidden_layers")
    linear = f"{text}linear_attn_config"
    numbers = config.get(f"{linear}.kda_layers")
    if not isinstance(numbers, list) or not all(type(item) is int for item in numbers):
        raise config.error(f"{linear}.kda_layers", numbers, "a list of whole numbers")
    states = sum(number in numbers for number in range(1, layers + 1))  # they count from 1
    fused = config.get(f"{linear}.use_full_rank_gate") is True
    return HybridShape(
        family=KIMI,
        state_layers=states,
        attention_layers=layers - states,
        draft_layers=config.whole(f"{text}num_nextn_predict_layers", least=0, default=0),
        heads=config.whole(f"{linear}.num_heads"),
        head_size=config.whole(f"{linear}.head_dim"),
        conv_width=config.whole(f"{linear}.short_conv_kernel_size"),
        latent=_latent(config, text),
        indexer=None,
        checkpoints=fused and config.get(f"{linear}.gate_lower_bound") is not ABSENT,
        dtype=_dtype(config, text),
        max_model_len=_max_model_len(config, text),
    )


def _latent(config: ModelConfig, text: str) -> int:
    rope = config.whole(f"{text}qk_rope_head_dim", least=0)
    return config.whole(f"{text}kv_lora_rank") + rope


def _dtype(config: ModelConfig, text: str) -> str:
    names = (f"{text}dtype", f"{text}torch_dtype", "dtype", "torch_dtype")
    found = next((value for name in names if (value := config.get(name)) is not ABSENT), "bfloat16")
    return str(found).removeprefix("torch.")


def _max_model_len(config: ModelConfig, text: str) -> int | None:
    path = f"{text}max_position_embeddings"
    return None if config.get(path) is ABSENT else config.whole(path)
