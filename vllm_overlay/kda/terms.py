"""What the Triton kernels compute of a single token, and where they find it."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from vllm.triton_utils import tl, triton


@triton.jit
def unit(x, length: tl.constexpr = 1.0):
    """``x`` [K] at ``length``."""
    return x * (tl.rsqrt(tl.sum(x * x) + 1e-6) * length)


@triton.jit
def decay(logit, bias, rate, lower_bound):
    """A token's decay [K], of its gate logits in float32; ``lower_bound`` may be None."""
    x = logit + bias
    if lower_bound is not None:
        gate = lower_bound * tl.sigmoid(rate * x)
    else:  # the softplus, whose exponential cannot overflow
        gate = -rate * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
    return tl.exp(gate)


@triton.jit
def recorded(key_ptr, gate_ptr, bias, rate, lower_bound, UNIT: tl.constexpr):
    """A recorded token's unit key and decay, from pointers to its key and its gate."""
    key = tl.load(key_ptr).to(tl.float32)
    gate = tl.load(gate_ptr).to(tl.float32)
    if not UNIT:
        key = unit(key)
        gate = decay(gate, bias, rate, lower_bound)
    return key, gate


@triton.jit
def record(key_ptr, gate_ptr, raw_key, raw_gate, key, gate_decay, valid, UNIT: tl.constexpr):
    """Record a token: its unit key and decay, or its key and gate logits as they came."""
    if UNIT:
        tl.store(key_ptr, key, mask=valid)
        tl.store(gate_ptr, gate_decay, mask=valid)
    else:
        tl.store(key_ptr, raw_key, mask=valid)
        tl.store(gate_ptr, raw_gate, mask=valid)


@triton.jit
def zero(out_ptr, stride_out, length, BV: tl.constexpr, WINDOW: tl.constexpr):
    """Zero a padded row's outputs; ``out_ptr`` points to the first token's ``BV`` values."""
    for t in tl.static_range(WINDOW):
        tl.store(out_ptr + t * stride_out, tl.zeros([BV], tl.float32), mask=t < length)
