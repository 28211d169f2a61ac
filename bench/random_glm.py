"""A small random GLM-5.3-Flash whose states matter, in vLLM's engine in this process."""

from __future__ import annotations

import json
import os
import random
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its parts are looked at from here
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader import dummy_loader

WORDS = 32768


@dataclass(frozen=True)
class Engine:
    """An engine: the KDA ``heads`` of its model decide how many tokens a mamba block has."""

    heads: int = 4
    layers: int = 8
    hidden: int = 1024
    method: str = "mtp"  # or ngram
    acceptance: float = 4.0  # synthetic mean length; 0: drafts are accepted for what they are
    prefix_caching: bool = False
    eager: bool = False
    kv_gib: float = 2.0
    seqs: int = 32
    batched: int = 2048
    graphs: Sequence[int] = (8, 16, 32, 64, 128, 256)


def model_config(heads: int, layers: int, hidden: int) -> dict[str, Any]:
    """GLM-5.3-Flash's layer shapes with fewer and narrower layers."""
    text = {
        "model_type": "glm5_next_text",
        "vocab_size": WORDS,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "moe_intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "qk_nope_head_dim": 256,
        "max_position_embeddings": 65536,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "mlp_layer_types": ["dense"] * layers,
        "layer_types": [
            "deepseek_sparse_attention" if number % 4 == 3 else "linear_attention"
            for number in range(layers)
        ],
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_kpool": 16,
        "index_kpool_always_select_tail": True,
        "linear_head_dim": 128,
        "linear_num_heads": heads,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "mhc": False,
        "mla_use_nope": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
        "indexer_rope_interleave": False,
    }
    return {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
    }


def lively(param: torch.Tensor, name: str) -> None:
    """Fill a weight so that a wrong state shows in the logits; vLLM's dummy weights hide it."""
    if not torch.is_floating_point(param) or param.device.type == "meta":
        return
    generator = torch.Generator(device=param.device)
    generator.manual_seed(zlib.crc32(name.encode()))
    values = torch.empty(param.shape, dtype=torch.float32, device=param.device)
    if name.endswith("A_log"):
        values.uniform_(0.0, 2.0, generator=generator)
    elif name.endswith("dt_bias"):
        values.uniform_(-4.0, -1.0, generator=generator)
    elif name.endswith("bias") or "compress_ape" in name:
        values.zero_()
    elif param.dim() <= 1:
        values.fill_(1.0)
    elif "conv1d" in name:
        values.normal_(0.0, 0.5, generator=generator)
    else:
        wide = 1.0 if "embed_tokens" in name else param.shape[-1] ** -0.5
        values.normal_(0.0, wide, generator=generator)
    with torch.no_grad():
        param.copy_(values)


def start(engine: Engine) -> LLM:
    """Return the engine, its model's weights the same in every process."""
    folder = Path(tempfile.mkdtemp())
    config = model_config(engine.heads, engine.layers, engine.hidden)
    (folder / "config.json").write_text(json.dumps(config))
    dummy_loader.initialize_single_dummy_weight = lively
    speculative: dict[str, Any] = {"method": engine.method, "num_speculative_tokens": 7}
    if engine.method == "ngram":
        speculative |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if engine.acceptance:
        speculative["rejection_sample_method"] = "synthetic"
        speculative["synthetic_acceptance_length"] = engine.acceptance
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=8192,
        max_num_seqs=engine.seqs,
        max_num_batched_tokens=engine.batched,
        enable_prefix_caching=engine.prefix_caching,
        enforce_eager=engine.eager,
        kv_cache_memory_bytes=int(engine.kv_gib * 2**30),
        gpu_memory_utilization=0.1,
        disable_log_stats=False,
        seed=0,
        speculative_config=speculative,
        compilation_config={"cudagraph_capture_sizes": list(engine.graphs)},
    )


def prompts(count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    draw = random.Random(seed)
    return [
        {"prompt_token_ids": [draw.randrange(10, 32000) for _ in range(length)]}
        for _ in range(count)
    ]


def kv_tokens(llm: LLM) -> int:
    """How many tokens of requests of the greatest length vLLM says that the cache holds."""
    config = llm.llm_engine.vllm_config
    return int(config.cache_config.kv_cache_max_concurrency * config.model_config.max_model_len)


def greedy(llm: LLM, asked: list[dict[str, list[int]]], tokens: int, **more: Any) -> list[Any]:
    """Answer the prompts with exactly ``tokens`` tokens each."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more
    )
    return list(llm.generate(asked, sampling, use_tqdm=False))
