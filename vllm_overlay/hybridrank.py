"""One rank's part of a hybrid model under the serve flags: bytes of its states and of a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_overlay.flagvalues import size
from vllm_overlay.hybridmodel import GLM, HybridShape

MIN_BLOCK = 128  # tokens: what the kernels of latent attention want of a hybrid model's block
INDEX_PAGE = 32  # entries: the least page of the indexer's kernel
PACKED_TOKEN = 656  # bytes a token in vLLM's format fp8_ds_mla
DTYPES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
STATE_DTYPES = {"auto": 4, "float32": 4, "bfloat16": 2}
FUSED_PREFILL = (9, 10, 12)  # major compute capabilities that have the fused kernel
# Ways of speculation that bring no layers with a KV cache of their own.
LAYERLESS = ("", "ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


class NotCoveredError(Exception):
    """The arithmetic does not cover this configuration; the text says what of it."""


@dataclass(frozen=True)
class Rank:
    """One rank's part of the model under the serve flags."""

    shape: HybridShape
    conv: int
    recurrent: int
    drafts: int
    attention_layers: int
    aligned_token: int  # bytes a token that vLLM aligns the block with
    stored_token: int  # bytes a token that an attention layer stores
    base_block: int
    kernel_block: int
    mode: str
    fused_prefill: bool
    one_state: bool
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, shape: HybridShape, serve: Mapping[str, Any], major: int) -> Rank:
        ranks = number(serve, "tensor-parallel-size") or 1
        if shape.heads % ranks:
            raise NotCoveredError(
                f"{shape.heads} heads of linear attention over tensor-parallel-size {ranks}"
            )
        drafts, layers, notes = _speculation(serve, shape)
        model = _model_dtype(serve, shape)
        conv_bytes = _dtype(serve, "mamba-cache-dtype", {"auto": DTYPES[model], **DTYPES})
        state_bytes = _dtype(serve, "mamba-ssm-cache-dtype", STATE_DTYPES)
        heads = shape.heads // ranks
        aligned, stored = _token_bytes(serve, shape, DTYPES[model], major)
        own = number(serve, "block-size")
        kernel = shape.indexer.pool * INDEX_PAGE * (2 if major == 12 else 1) if shape.indexer else 1
        return cls(
            shape=shape,
            conv=3 * heads * shape.head_size * (shape.conv_width - 1 + drafts) * conv_bytes,
            recurrent=heads * shape.head_size**2 * state_bytes,
            drafts=drafts,
            attention_layers=shape.attention_layers + layers,
            aligned_token=aligned,
            stored_token=stored,
            base_block=own or kernel,
            kernel_block=kernel,
            mode=_cache_mode(serve),
            fused_prefill=_fused_prefill(serve, shape, model, major),
            one_state=serve.get("use-replayssm") is True and shape.family != GLM,
            notes=notes,
        )

    @property
    def layer_token(self) -> int:
        """Bytes a token in one attention layer, its indexer included, rounded up."""
        indexer = self.shape.indexer
        return self.stored_token + (up(indexer.entry, indexer.pool) if indexer else 0)

    def block_tokens(self) -> int:
        """Tokens of a block: the least that has room for a state and pleases every kernel."""
        unit = max(self.base_block, MIN_BLOCK)
        tokens = unit * up(self.conv + self.recurrent, unit * self.aligned_token)
        return self.kernel_block * up(tokens, self.kernel_block)


def _token_bytes(
    serve: Mapping[str, Any], shape: HybridShape, model_bytes: int, major: int
) -> tuple[int, int]:
    """Return the bytes a token that the block is aligned with, and those a layer stores.

    vLLM aligns the block before it counts what its packed 8-bit format adds to a token.
    """
    dtype = str(serve.get("kv-cache-dtype", "auto"))
    if dtype == "auto" and shape.indexer and major in (10, 12):
        dtype = "fp8"
    if dtype in ("auto", *DTYPES):
        stored = shape.latent * DTYPES.get(dtype, model_bytes)
        return stored, stored
    if not dtype.startswith("fp8"):
        raise NotCoveredError(f"kv-cache-dtype {dtype}")
    packed = dtype == "fp8_ds_mla" or (shape.indexer is not None and major != 10)
    return shape.latent, PACKED_TOKEN if packed else shape.latent


def _speculation(serve: Mapping[str, Any], shape: HybridShape) -> tuple[int, int, tuple[str, ...]]:
    """Return the draft tokens a step, the layers that the draft adds, and what is not counted."""
    config = serve.get("speculative-config")
    if not isinstance(config, Mapping):
        return 0, 0, ()
    method = str(config.get("method", ""))
    own = method.endswith("mtp")
    drafts = config.get("num_speculative_tokens", shape.draft_layers if own else None)
    if not isinstance(drafts, int):
        raise NotCoveredError("a speculative-config without num_speculative_tokens")
    if own or (method in LAYERLESS and "model" not in config):
        return drafts, shape.draft_layers if own else 0, ()
    return drafts, 0, (f"the draft model's own KV cache is not counted (method '{method}')",)


def _cache_mode(serve: Mapping[str, Any]) -> str:
    """Return the mamba cache mode that vLLM makes of the flags: prefix caching is its default."""
    if serve.get("enable-prefix-caching") is False:
        return "none"
    mode = str(serve.get("mamba-cache-mode", "none"))
    if mode not in ("none", "align"):
        raise NotCoveredError(f"mamba-cache-mode {mode}")
    return "align"


def _fused_prefill(
    serve: Mapping[str, Any], shape: HybridShape, model_dtype: str, major: int
) -> bool:
    additional = serve.get("additional-config")
    asked = additional.get("kda_prefill_backend") if isinstance(additional, Mapping) else None
    able = shape.head_size == 128 and model_dtype == "bfloat16" and major in FUSED_PREFILL
    return shape.checkpoints and able and asked in (None, "auto", "flashkda")


def _model_dtype(serve: Mapping[str, Any], shape: HybridShape) -> str:
    name = str(serve.get("dtype", "auto"))
    if name == "auto":
        # vLLM serves weights of 32 bits in 16
        name = "bfloat16" if shape.dtype in ("float32", "float") else shape.dtype
    if name not in DTYPES:
        raise NotCoveredError(f"dtype {name}")
    return name


def _dtype(serve: Mapping[str, Any], flag: str, known: Mapping[str, int]) -> int:
    name = str(serve.get(flag, "auto"))
    if name not in known:
        raise NotCoveredError(f"{flag} {name}")
    return known[name]


def number(serve: Mapping[str, Any], flag: str) -> int | None:
    value = serve.get(flag)
    if value is None or isinstance(value, bool):
        return None
    try:
        return size(str(value))
    except ValueError:
        raise NotCoveredError(f"{flag} {value}") from None


def model_length(serve: Mapping[str, Any], shape: HybridShape) -> int | None:
    if str(serve.get("max-model-len", "")) in ("", "auto", "-1"):
        return shape.max_model_len
    return number(serve, "max-model-len")


def up(value: int, divisor: int) -> int:
    return -(-value // divisor)
