"""Drives a GLM-5.3-Flash KDA layer through steps, stock or fixed: builder, layer, commit.

``python -m tests.support.glm_layer`` prints JSON: the digest of each step's output, and whether any
real token's output was left unwritten. The prefill's own kernels, which need a GPU and
which the fix does not touch, are stand-ins.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

# isort: off
from tests.support import interpreter  # before vLLM
import torch
from vllm.models.glm5next.common import kda
from vllm.models.glm5next.nvidia.ops.third_party.kda.fused_recurrent import token_stride
from vllm.utils import torch_utils
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import gdn_attn
from vllm.v1.attention.backends import utils as backend_utils
from vllm.v1.kv_cache_interface import MambaSpec
# isort: on

NAME, HEADS, DIM, DRAFTS, REQUESTS = "layers.0.attn", 2, 16, 3, 4
CHANNELS, HISTORY = 3 * HEADS * DIM, 3


@dataclass(frozen=True)
class Row:
    """One request in a step: ``tokens`` of its prompt, or of drafts and the token before them."""

    request: int
    tokens: int
    accepted: int = 0  # of a verify, with the token that was sampled; 0 for a prefill
    chunk: bool = False  # one token of a prompt that goes on: it verifies, and samples nothing


# Prefills, verifies, rows that change places, mixed steps with prefills first, last and between,
# chunks of one token.
STEPS = [
    [Row(0, 5), Row(1, 3)],
    [Row(0, 4, 2), Row(1, 4, 4)],
    [Row(2, 6), Row(0, 4, 1), Row(1, 2, 1)],
    [Row(1, 1, 1), Row(2, 4, 3), Row(0, 3, 3)],
    [Row(0, 4, 4), Row(3, 2), Row(2, 4, 2)],
    [Row(3, 4, 2), Row(0, 1, 1), Row(1, 4, 3), Row(2, 4, 4)],
    [Row(3, 4, 1), Row(0, 4, 2)],
    [Row(3, 1, 1, chunk=True), Row(0, 4, 3)],
    [Row(0, 4, 2), Row(3, 1, 1, chunk=True)],
    [Row(3, 3), Row(0, 4, 1)],
    [Row(3, 4, 2), Row(0, 4, 4)],
]


def config(layers: dict[str, Any]) -> Any:
    """What the builder reads of a VllmConfig."""
    off = SimpleNamespace(has_full_cudagraphs=lambda: True)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=off, max_cudagraph_capture_size=None, static_forward_context=layers
        ),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=DRAFTS,
            parallel_drafting=False,
            use_eagle_block_drop=lambda: False,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
        cache_config=SimpleNamespace(mamba_cache_mode="none", mamba_block_size=64),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(linear_head_dim=DIM), dtype=torch.bfloat16
        ),
        additional_config={"gdn_prefill_backend": "triton"},
        use_v2_model_runner=True,
        num_speculative_tokens=DRAFTS,
        num_hash_lookahead_tokens=0,
    )


def layer() -> Any:
    """Return a layer without vLLM's process groups: everything that its forward part reads."""
    made = kda.Glm5NextLinearAttention.__new__(kda.Glm5NextLinearAttention)
    torch.nn.Module.__init__(made)
    parts = {
        "prefix": NAME,
        "num_spec": DRAFTS,
        "local_num_heads": HEADS,
        "head_dim": DIM,
        "local_projection_size": HEADS * DIM,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "kda_prefill_backend": "triton",
        "_conv_state_dim_first": kda.is_conv_state_dim_first(),
        "_merged_conv_weight": torch.randn(CHANNELS, HISTORY + 1),
        "q_conv1d": SimpleNamespace(bias=None),
        "A_log": torch.rand(1, 1, HEADS, 1),
        "dt_bias": torch.rand(HEADS * DIM),
        "kv_cache": (
            torch.randn(1 + REQUESTS * (1 + DRAFTS), HISTORY + DRAFTS, CHANNELS).bfloat16(),
            torch.randn(1 + REQUESTS * (1 + DRAFTS), HEADS, DIM, DIM),
        ),
    }
    if kda.is_conv_state_dim_first():
        conv, state = parts["kv_cache"]  # type: ignore[misc]
        parts["kv_cache"] = (conv.transpose(-1, -2).contiguous(), state)
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    if hasattr(kda, "allocate_records"):
        records = kda.allocate_records(
            REQUESTS, HEADS, DIM, 1 + DRAFTS, torch.float32, torch.device("cpu")
        )
        object.__setattr__(made, "recoverssm_records", records)
    return made


def stand_in_for_prefill_kernels() -> None:
    def conv(
        x: Any, weight: Any, bias: Any, *, conv_states: Any, cache_indices: Any, **_: Any
    ) -> Any:
        conv_states[cache_indices.long(), :, :HISTORY] = 0.25
        return x.clone()

    def gather(state: Any, indices: Any, has_initial_state: Any) -> Any:
        return torch.where(has_initial_state[:, None, None, None], state[indices.long()], 0.0)

    def scatter(state: Any, values: Any, indices: Any) -> None:
        state[indices.long()] = values

    def chunk(*, q: Any, v: Any, initial_state: Any, cu_seqlens: Any, **_: Any) -> Any:
        assert int(cu_seqlens[-1]) == q.shape[1]
        lens = cu_seqlens.diff().view(-1, 1, 1, 1)
        return v * 0.5, initial_state * 0.5 + lens

    kda.causal_conv1d_fn, kda.gather_initial_states = conv, gather
    kda.scatter_states, kda.chunk_kda_with_fused_gate = scatter, chunk
    kda._cast_sigmoid = lambda x: x.float().sigmoid()
    torch_utils.PIN_MEMORY = backend_utils.PIN_MEMORY = False


class Engine:
    """A layer, its metadata builder, and the runner's part of a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = layer()
        vllm_config = config({NAME: self.layer})
        builder = gdn_attn.GDNAttentionMetadataBuilder
        self.state = None
        if hasattr(kda, "Glm5NextRecoverSSMBackend"):
            from vllm.models.glm5next.common import recoverssm

            builder = self.layer.get_attn_backend().get_builder_cls()
            self.state = recoverssm.Glm5NextRecoverSSMState()
        spec = MambaSpec(
            block_size=64,
            shapes=tuple(part.shape[1:] for part in self.layer.kv_cache),
            dtypes=tuple(part.dtype for part in self.layer.kv_cache),
            num_speculative_blocks=0 if self.state else DRAFTS,
        )
        self.builder = builder(spec, [NAME], vllm_config, torch.device("cpu"))
        table = 1 + torch.randperm(REQUESTS * (1 + DRAFTS)).view(REQUESTS, -1).int()
        self.table = table[:, :1] if self.state else table
        self.computed = torch.zeros(REQUESTS, dtype=torch.int32)
        self.accepted = torch.ones(REQUESTS, dtype=torch.int32)

    def metadata(self, rows: list[Row]) -> Any:
        """Return what the builder makes of a step."""
        requests = torch.tensor([row.request for row in rows])
        lens = torch.tensor([row.tokens for row in rows], dtype=torch.int32)
        start = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).int()])
        verifies = torch.tensor([row.accepted > 0 for row in rows])
        seq_lens = self.computed[requests] + lens
        common = CommonAttentionMetadata(
            query_start_loc=start,
            query_start_loc_cpu=start,
            seq_lens=seq_lens,
            num_reqs=len(rows),
            num_actual_tokens=int(start[-1]),
            max_query_len=int(lens.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self.table[requests],
            slot_mapping=torch.zeros(int(start[-1]), dtype=torch.int64),
            is_prefilling=~verifies,
            seq_lens_cpu_upper_bound=seq_lens,
        )
        drafts = torch.where(verifies & (lens > 0), lens - 1, -1)
        return self.builder.build(0, common, self.accepted[requests], drafts)

    def step(self, rows: list[Row]) -> torch.Tensor:
        """Return the layer's output [tokens, heads, head size]; NaN where nothing was written."""
        metadata = self.metadata(rows)
        requests = torch.tensor([row.request for row in rows])
        out = self._forward(metadata, sum(row.tokens for row in rows))
        sampled = torch.tensor(
            [0 if row.chunk else row.accepted for row in rows], dtype=torch.int32
        )
        if self.state is not None:
            groups = [[SimpleNamespace(layer_names=[NAME])]]
            self.state.record_step({NAME: metadata}, groups, for_capture=False)
            self.state.commit_step(
                sampled, requests, state_indices=None, num_accepted_tokens=self.accepted
            )
        self.accepted[requests] = sampled.clamp(min=1)
        for row in rows:
            self.computed[row.request] += row.accepted or row.tokens
        return out

    def _forward(self, metadata: Any, tokens: int) -> torch.Tensor:
        width = CHANNELS + HEADS + 2 * DIM
        projected = torch.randn(tokens, width).bfloat16()
        out = torch.full((1, tokens, HEADS, DIM), float("nan")).bfloat16()
        beta = projected[None, :, CHANNELS : CHANNELS + HEADS]
        assert token_stride(beta) == width
        kda.get_forward_context = lambda: SimpleNamespace(attn_metadata={NAME: metadata})
        gate = torch.randn(1, tokens, HEADS, DIM).bfloat16()
        self.layer._forward(projected[:, :CHANNELS], gate, beta, out)
        return out[0]


def main() -> None:
    stand_in_for_prefill_kernels()
    interpreter.rebind()
    engine = Engine()
    found = []
    for rows in STEPS:
        out = engine.step(rows)
        digest = hashlib.sha256(out.contiguous().view(torch.int16).numpy().tobytes())
        found.append([digest.hexdigest()[:16], bool(out.isnan().any())])
    print(json.dumps({"fixed": engine.state is not None, "steps": found}))


if __name__ == "__main__":
    main()
