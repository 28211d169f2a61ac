"""The straightforward port of RecoverSSM, to be measured beside the fix's: nothing else uses it.

Its verify records each token's raw inputs, with the stock kernel's tile; its commit replays all of
a window through the stock kernel, one launch a layer, as the public fix for GLM-5.3-Flash does.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent_kda
from vllm.third_party.flash_linear_attention.ops.op import exp
from vllm.triton_utils import tl, triton


@triton.jit
def _unit(x):
    return x / tl.sqrt(tl.sum(x * x) + 1e-6)


@triton.jit
def _verify(
    q_ptr, k_ptr, v_ptr, gate_ptr, beta_ptr, out_ptr, state_ptr, raw_kv_ptr, raw_gate_ptr,
    raw_beta_ptr, block_ptr, a_log_ptr, bias_ptr, scale, stride_qkv, stride_beta,
    STRIDE_STATE: tl.constexpr, H: tl.constexpr, K: tl.constexpr, Q: tl.constexpr,
    BV: tl.constexpr, LOWER_BOUND: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    part, head, row = pid % (K // BV), (pid // (K // BV)) % H, pid // (K // BV * H)
    block = tl.load(block_ptr + row).to(tl.int64)
    keys = head * K + tl.arange(0, K)
    values = head * K + part * BV + tl.arange(0, BV)
    tile = values[:, None] * K + tl.arange(0, K)[None, :]
    amplitude = tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(bias_ptr + keys)
    state = tl.load(state_ptr + block * STRIDE_STATE + tile).to(tl.float32)
    for step in range(Q):
        token = row * Q + step
        raw_key = tl.load(k_ptr + token * stride_qkv + keys)
        raw_value = tl.load(v_ptr + token * stride_qkv + values)
        raw_gate = tl.load(gate_ptr + token * H * K + keys)
        raw_beta = tl.load(beta_ptr + token * stride_beta + head)
        query = _unit(tl.load(q_ptr + token * stride_qkv + keys).to(tl.float32)) * scale
        key = _unit(raw_key.to(tl.float32))
        decay = LOWER_BOUND / (1.0 + tl.exp(-(amplitude * (raw_gate.to(tl.float32) + bias))))
        state *= exp(decay)[None, :]
        correction = raw_value.to(tl.float32) - tl.sum(state * key[None, :], 1)
        correction *= tl.sigmoid(raw_beta.to(tl.float32))
        state += correction[:, None] * key[None, :]
        out = tl.sum(state * query[None, :], 1)
        tl.store(out_ptr + token * H * K + values, out.to(out_ptr.dtype.element_ty))
        raw = raw_kv_ptr + token * 2 * H * K
        tl.store(raw + H * K + values, raw_value)
        if part == 0:
            tl.store(raw + keys, raw_key)
            tl.store(raw_gate_ptr + token * H * K + keys, raw_gate)
            tl.store(raw_beta_ptr + token * H + head, raw_beta)


def verify(qkv: tuple[torch.Tensor, ...], layer: dict[str, Any], blocks: torch.Tensor) -> None:
    """Write ``layer['out']`` and the raw records of every row's whole window."""
    state, (rows, window) = layer["state"], (len(blocks), layer["raw_kv"].shape[1])
    heads, dim = state.shape[1:3]
    q, k, v = qkv
    _verify[(rows * heads * (dim // 8),)](
        q, k, v, layer["gate"], layer["beta"], layer["out"], state, layer["raw_kv"],
        layer["raw_gate"], layer["raw_beta"], blocks, layer["a_log"], layer["bias"], dim**-0.5,
        q.stride(1), layer["beta"].stride(1), STRIDE_STATE=state.stride(0), H=heads,
        K=dim, Q=window, BV=8, LOWER_BOUND=-5.0, num_warps=1,
    )  # fmt: skip


@triton.jit
def _replay_table(plan_ptr, table_ptr, Q: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    length = tl.load(plan_ptr + row * 5)
    block = tl.where(column == length - 1, tl.load(plan_ptr + row * 5 + 2), 0)
    block = tl.where(column == Q, tl.load(plan_ptr + row * 5 + 1), block)
    tl.store(table_ptr + row * (Q + 1) + column, block, mask=column <= Q)


def replay(
    layers: list[dict[str, Any]],
    plan: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    from_column: torch.Tensor,
) -> None:
    """Replay each row's window in every layer of a group, and store the accepted state."""
    window = table.shape[1] - 1
    _replay_table[(len(table),)](
        plan, table, Q=window, BLOCK=triton.next_power_of_2(window + 1), num_warps=1
    )
    for layer in layers:
        heads, dim = layer["state"].shape[1:3]
        raw_kv = layer["raw_kv"].view(-1, 2, heads, dim)
        fused_recurrent_kda(
            q=raw_kv[None, :, 0],
            k=raw_kv[None, :, 0],
            v=raw_kv[None, :, 1],
            g=layer["raw_gate"].view(1, -1, heads, dim),
            beta=layer["raw_beta"].view(1, -1, heads),
            initial_state=layer["state"],
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=start,
            ssm_state_indices=table,
            num_accepted_tokens=from_column,
            out=layer["replayed"],
            sigmoid_beta=True,
            a_log=layer["a_log"],
            g_bias=layer["bias"],
            compute_gate=True,
            lower_bound=-5.0,
        )
