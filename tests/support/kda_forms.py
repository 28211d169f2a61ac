"""Runs a course of KDA steps with vLLM's kernels, or with a verify that folds. Needs vLLM."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent_kda
from vllm.models.kimi_k3.nvidia.ops import recoverssm as k3

from tests.support.kda_float64 import DIM, Course, Outcome, aligned
from vllm_overlay.kda.operands import Folds, Records, Window

Run = Callable[[Course], Outcome]
Verify = Callable[..., torch.Tensor]


def stock(course: Course) -> Outcome:
    """vLLM's own step: of GLM-5.3-Flash with a bound of the decay, of Kimi-K3 without one."""
    return stock_k3(course) if course.case.lower_bound is None else stock_glm(course)


def stock_glm(course: Course) -> Outcome:
    """A state after every token, and the accepted token's read. Its inputs are given in fp32,
    which holds them exactly, because the kernel writes outputs in its inputs' type."""
    case, outputs = course.case, []
    device = course.start.device
    slots = 1 + torch.randperm(case.rows * case.window, device=device)
    slots = slots.view(case.rows, case.window).int()
    state = torch.zeros(1 + slots.numel(), *course.start.shape[1:], device=device).to(case.state)
    state[slots[:, 0]] = course.start
    last, rows = torch.ones_like(course.accepted[0]), torch.arange(case.rows, device=device)
    began = course.start
    for step in range(case.steps):
        tokens = course.tokens(step)
        if step == case.steps - 1:
            began = state[slots[rows, last.long() - 1]]
        out, _ = fused_recurrent_kda(
            q=tokens.q.float(),
            k=tokens.k.float(),
            v=tokens.v.float(),
            g=tokens.gate,
            beta=tokens.beta,
            initial_state=state,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=tokens.start_loc,
            ssm_state_indices=slots,
            num_accepted_tokens=last,
            sigmoid_beta=True,
            a_log=course.a_log,
            g_bias=course.gate_bias,
            compute_gate=True,
            lower_bound=case.lower_bound,
        )
        last = course.accepted[step]
        if step in case.watched:
            outputs.append(out[0])
    return Outcome(outputs, began)


def stock_k3(course: Course) -> Outcome:
    """A verify from one state, and a commit of what was accepted."""
    case, device, outputs = course.case, course.start.device, []
    blocks, state = _checkpoints(course)
    sizes = (case.rows, case.heads, case.window, DIM, torch.bfloat16, device)
    records = k3.KDARecoverSSMRecords.allocate(*sizes)
    conv = torch.zeros(case.rows + 1, 2 + case.window, 3 * case.heads * DIM, device=device)
    layer = SimpleNamespace(
        kv_cache=(conv, state),
        recoverssm_records=records,
        A_log=course.a_log,
        dt_bias=course.gate_bias,
        local_num_heads=case.heads,
        head_dim=DIM,
        gate_lower_bound=case.lower_bound,
    )
    context = k3.KDARecoverSSMCommitContext.create(
        [layer], spec_query_len=case.window, max_num_reqs=case.rows
    )
    for step in range(case.steps):
        tokens = course.tokens(step)
        out = torch.empty(tokens.v.shape, device=device)
        k3.kda_recoverssm_verify(
            tokens.q,
            tokens.k,
            tokens.v,
            tokens.gate,
            tokens.beta,
            course.a_log,
            course.gate_bias,
            case.lower_bound,
            state,
            records,
            tokens.start_loc,
            blocks,
            case.window,
            out,
        )
        if step in case.watched:
            outputs.append(out[0])
        if step < case.steps - 1:
            context.commit(course.accepted[step], blocks, tokens.start_loc)
    return Outcome(outputs, state[blocks.long()])


def exact(course: Course) -> Outcome:
    """The fix glm5next-recoverssm, which must be applied; in fp32 as ``stock_glm``."""
    from vllm.models.glm5next.common import recoverssm_commit as glm

    case, device, outputs = course.case, course.start.device, []
    blocks, state = _checkpoints(course)
    sizes = (case.rows, case.heads, DIM, case.window)
    records = glm.allocate_records(*sizes, torch.float32, device)
    conv = torch.zeros(case.rows + 1, 2 + case.window, 3 * case.heads * DIM, device=device)
    layer = SimpleNamespace(kv_cache=(conv, state), recoverssm_records=records)
    context = glm.Glm5NextRecoverSSMCommitContext.create(
        [layer], spec_query_len=case.window, max_num_reqs=case.rows
    )
    for step in range(case.steps):
        tokens = course.tokens(step)
        out = glm.kda_recoverssm_verify(
            q=tokens.q.float(),
            k=tokens.k.float(),
            v=tokens.v.float(),
            g=tokens.gate,
            beta=tokens.beta,
            a_log=course.a_log,
            g_bias=course.gate_bias,
            lower_bound=case.lower_bound,
            checkpoint_state=state,
            records=records,
            query_start_loc=tokens.start_loc,
            state_indices=blocks,
        )
        if step in case.watched:
            outputs.append(out[0])
        if step < case.steps - 1:
            context.commit(course.accepted[step], blocks, tokens.start_loc)
    return Outcome(outputs, state[blocks.long()])


class Ring:
    """Records in two halves of ``rows``, which steps write in turn, and a scratch row.

    ``unit`` records lie as GLM-5.3-Flash's fix has them, raw ones as Kimi-K3's. ``data``: what
    they are views of; ``rows`` int32 [2, rows].
    """

    def __init__(self, course: Course, *, unit: bool) -> None:
        case, device = course.case, course.start.device
        self.scratch = 2 * case.rows
        count, window, heads = self.scratch + 1, case.window, case.heads
        new: dict[str, Any] = {"device": device, "dtype": torch.float32}
        if unit:
            parts = torch.zeros(count, window, 3, heads, DIM, **new)
            keys, gates, corrections = parts.permute(2, 0, 3, 1, 4)
            self.data = [parts]
        else:
            corrections = torch.zeros(count, heads, window, DIM, **new)
            pairs = torch.zeros(count, heads, window, 2 * DIM, device=device, dtype=torch.bfloat16)
            keys, gates = pairs.split(DIM, -1)
            self.data = [corrections, pairs]
        self.records = Records(corrections, keys, gates, unit)
        self.rows = aligned(torch.arange(self.scratch).view(2, -1), device)


def window_of(course: Course, step: int, blocks: torch.Tensor) -> Window:
    """Return a step's operands."""
    tokens = course.tokens(step)
    return Window(
        q=tokens.q,
        k=tokens.k,
        v=tokens.v,
        gate=tokens.gate,
        beta=tokens.beta,
        a_log=course.a_log,
        gate_bias=course.gate_bias,
        lower_bound=course.case.lower_bound,
        start_loc=tokens.start_loc,
        blocks=blocks,
        size=course.case.window,
    )


def folding(verify: Verify, *, unit: bool, out: torch.dtype = torch.float32) -> Run:
    """Return the run of a verify that folds: with unit or raw records, outputs of type ``out``."""

    def run(course: Course) -> Outcome:
        case, outputs = course.case, []
        blocks, state = _checkpoints(course)
        ring = Ring(course, unit=unit)
        pending = torch.zeros_like(course.accepted[0])
        for step in range(case.steps):
            window = window_of(course, step, blocks)
            result = torch.empty(window.v.shape, dtype=out, device=state.device)
            folds = Folds(pending, ring.rows[(step + 1) % 2])
            verify(window, state, ring.records, ring.rows[step % 2], ring.scratch, folds, result)
            pending = course.accepted[step]
            if step in case.watched:
                outputs.append(result[0])
        return Outcome(outputs, state[blocks.long()])

    return run


def _checkpoints(course: Course) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks int32 [rows] in any order, and a cache that holds the first states there."""
    rows, device = course.case.rows, course.start.device
    blocks = 1 + torch.randperm(rows, device=device)
    state = torch.zeros(rows + 1, *course.start.shape[1:], dtype=course.case.state, device=device)
    state[blocks] = course.start
    return blocks.int(), state
