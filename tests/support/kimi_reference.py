"""The KDA recurrence in float64, and how far the kernels are from it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.models.kimi_k3.nvidia.ops.recoverssm import (
    KDARecoverSSMCommitContext,
    KDARecoverSSMRecords,
    kda_recoverssm_verify,
)
from vllm.models.kimi_k3.nvidia.specialized_decode.recoverssm.context import (
    KDADeferredCommitContext,
    KDARecoverSSMDeferred,
    allocate_records,
    as_operands,
)

from vllm_overlay.kda.chunk import verify_chunk
from vllm_overlay.kda.operands import Window
from vllm_overlay.kda.sequential import verify_sequential
from vllm_overlay.kda.verify import Verify

HEAD_DIM = 128
LOWER_BOUND = -5.0
FUSED: dict[str, Verify] = {"sequential": verify_sequential, "chunk": verify_chunk}


def recurrence(
    state: torch.Tensor,
    tokens: dict[str, torch.Tensor],
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run tokens [rows, window, heads, ...] from ``state`` [rows, heads, V, K], all in float64.

    Returns the states after each token, the corrections and the outputs, by token.
    """
    q, k, v, g, beta = (tokens[name].double() for name in ("q", "k", "v", "g", "beta"))
    state = state.double()
    q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * HEAD_DIM**-0.5
    k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    rate = a_log.double().exp()[:, None]
    decay = (
        LOWER_BOUND * torch.sigmoid(rate * (g + dt_bias.double().unflatten(0, (-1, HEAD_DIM))))
    ).exp()
    states, corrections, outputs = [], [], []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None]
        u = v[:, t] - (state * k[:, t, :, None]).sum(-1)
        u = u * torch.sigmoid(beta[:, t])[..., None]
        state = state + u[..., None] * k[:, t, :, None]
        states.append(state)
        corrections.append(u)
        outputs.append((state * q[:, t, :, None]).sum(-1))
    return torch.stack(states, 1), torch.stack(corrections, 1), torch.stack(outputs, 1)


def errors(
    *, heads: int, requests: int, window: int, seed: int, device: str
) -> dict[str, dict[str, float]]:
    """Return the relative errors of two steps by method: the folded state, and the second step's
    corrections and outputs before rounding (fp32 outputs are asked for)."""
    torch.manual_seed(seed)
    shape = (requests, window, heads)
    steps = [
        {
            **{name: torch.randn(*shape, HEAD_DIM, device=device) for name in ("q", "k", "v", "g")},
            "beta": torch.randn(*shape, device=device),
        }
        for _ in range(2)
    ]
    a_log = torch.rand(heads, device=device) - 1
    dt_bias = torch.randn(heads * HEAD_DIM, device=device)
    start = torch.randn(requests + 1, heads, HEAD_DIM, HEAD_DIM, device=device)
    accepted = torch.randint(1, window + 1, (requests,), device=device, dtype=torch.int32)
    states, _, _ = recurrence(start[1:], steps[0], a_log, dt_bias)
    committed = states[torch.arange(requests, device=device), accepted.long() - 1]
    _, corrections, outputs = recurrence(committed, steps[1], a_log, dt_bias)
    want = {"state": committed, "corrections": corrections, "outputs": outputs}
    found = {}
    for method in ("stock", *FUSED):
        got = two_steps(FUSED.get(method), steps, a_log, dt_bias, start, accepted)
        found[method] = {
            name: float((got[name].double() - want[name]).norm() / want[name].norm())
            for name in want
        }
    return found


def two_steps(
    fused: Verify | None,
    steps: list[dict[str, torch.Tensor]],
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    start: torch.Tensor,
    accepted: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Verify, commit, verify: with vLLM's kernels, or with a fused verify."""
    rows, window, heads = steps[0]["beta"].shape
    state, device = start.clone(), start.device
    sizes = (rows, heads, window, HEAD_DIM, torch.float32, device)
    make = allocate_records if fused else KDARecoverSSMRecords.allocate
    records = make(*sizes)
    conv = torch.zeros(rows + 1, 3 + window - 1, 3 * heads * HEAD_DIM, device=device)
    layer = SimpleNamespace(
        kv_cache=(conv, state),
        recoverssm_records=records,
        A_log=a_log,
        dt_bias=dt_bias,
        local_num_heads=heads,
        head_dim=HEAD_DIM,
        gate_lower_bound=LOWER_BOUND,
    )
    kind = KDADeferredCommitContext if fused else KDARecoverSSMCommitContext
    context = kind.create([layer], spec_query_len=window, max_num_reqs=rows)
    starts = torch.arange(0, rows * window + 1, window, device=device, dtype=torch.int32)
    blocks = torch.arange(1, rows + 1, device=device, dtype=torch.int32)
    slots = blocks - 1
    pending = torch.zeros(rows, dtype=torch.int32, device=device)
    out = torch.empty(0)
    for number, tokens in enumerate(steps):
        flat = [tokens[name].flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta")]
        inputs = (*flat, a_log, dt_bias, LOWER_BOUND)
        lines = (starts, blocks, window)
        if fused:
            folds = KDARecoverSSMDeferred(slots, pending, None, context, blocks).plan(layer)
            kept = (as_operands(records), context.ledger.write_rows, rows)
            out = fused(Window(*inputs, *lines), state, *kept, folds, torch.empty_like(flat[2]))
        else:
            out = kda_recoverssm_verify(*inputs, state, records, *lines)
        if number == 0:
            extra = {"record_rows": slots, "pending": pending} if fused else {}
            context.commit(accepted, blocks, starts, **extra)
    written = context.ledger.write_rows.long() if fused else slots.long()
    corrections = records.correction[written].transpose(1, 2)
    return {
        "state": state[1:],
        "corrections": corrections,
        "outputs": out.unflatten(1, (rows, -1))[0],
    }
