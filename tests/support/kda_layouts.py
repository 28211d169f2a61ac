"""Compiles the stock KDA kernel and the fix's verify for Hopper, on any machine, and compares them.

Prints JSON: for each kernel the layout in which every sum starts, which fixes its order, and how
often each arithmetic instruction occurs. Needs Triton itself, not its interpreter, and no GPU.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

# isort: off
from tests.support import interpreter  # noqa: F401, before vLLM
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm.models.glm5next.common.recoverssm_kernels import verify_kernel
from vllm.models.glm5next.nvidia.ops.third_party.kda.fused_recurrent import (
    fused_recurrent_gated_delta_rule_fwd_kernel as stock_kernel,
)
# isort: on

HOPPER = GPUTarget("cuda", 90, 32)
HEADS, DIM = 16, 128
STRIDE = HEADS * DIM * DIM + 40960  # of a block's page, in elements
ARITHMETIC = r"\b(fma\.rn\.f32|mul\.f32|sub\.f32|div\.full\.f32|shfl\.sync\.bfly\.b32)"


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], odd: set[str]) -> Any:
    """Compile for one warp; arguments in ``odd`` are no multiple of 16."""
    names = kernel.arg_names
    aligned = [n for n, t in types.items() if n not in odd and (t[0] == "*" or "stride" in n)]
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=HOPPER, options={"num_warps": 1, "num_stages": 3})


def described(kernel: Any) -> dict[str, Any]:
    text = kernel.asm["ttgir"]
    for alias, layout in re.findall(r"^(#\w+) = (#ttg\.\w+<\{.*\}>)$", text, re.MULTILINE):
        text = re.sub(rf"{alias}\b(?! =)", layout, text)
    sums = []
    for operand, axis in re.findall(r'"tt\.reduce"\((%\w+)\) <\{axis = (\d)', text):
        line = re.search(rf"{operand} = .*", text)[0]  # type: ignore[index]
        layout = re.search(r": tensor<(?:\d+x)+f32, (.*?)>(?: ->| loc)", line)[1]  # type: ignore[index]
        sums.append([axis, layout])
    return {"sums": sums, "counts": Counter(re.findall(ARITHMETIC, kernel.asm["ptx"]))}


def stock(odd: bool) -> Any:
    pointers = dict.fromkeys(("q", "k", "v", "g", "beta", "o"), "*bf16")
    pointers |= dict.fromkeys(("h0", "ht", "a_log", "g_bias"), "*fp32")
    pointers |= dict.fromkeys(("cu_seqlens", "ssm_state_indices", "num_accepted_tokens"), "*i32")
    strides = ("stride_q_t", "stride_k_t", "stride_v_t", "stride_beta_t")
    types = pointers | {"scale": "fp32", "N": "i64", "T": "i64"} | dict.fromkeys(strides, "i32")
    flags = ("USE_INITIAL_STATE", "INPLACE_FINAL_STATE", "USE_QK_L2NORM_IN_KERNEL", "IS_VARLEN")
    flags += ("IS_CONTINUOUS_BATCHING", "IS_SPEC_DECODING", "IS_KDA", "SIGMOID_BETA")
    constants = dict.fromkeys((*flags, "COMPUTE_GATE", "SAFE_GATE"), True)
    constants |= {"IS_BETA_HEADWISE": False, "LOWER_BOUND": -5.0, "B": 1, "H": HEADS, "HV": HEADS}
    constants |= {"K": DIM, "V": DIM, "BK": DIM, "BV": 8, "stride_indices_tok": 1}
    constants |= {"stride_init_state_token": STRIDE, "stride_final_state_token": STRIDE}
    constants |= {"stride_indices_seq": 8}
    unaligned = {*strides, "k", "v", "beta"} if odd else set()
    return compiled(stock_kernel.fn, types, constants, unaligned)


def verify(odd: bool, rows: int) -> Any:
    pointers = dict.fromkeys(
        ("q_ptr", "k_ptr", "v_ptr", "gate_ptr", "beta_ptr", "out_ptr"), "*bf16"
    )
    pointers |= dict.fromkeys(("state_ptr", "record_ptr", "a_log_ptr", "gate_bias_ptr"), "*fp32")
    pointers |= dict.fromkeys(("start_loc_ptr", "block_ptr"), "*i32")
    strides = ("stride_q", "stride_k", "stride_v", "stride_beta", "stride_block")
    types = pointers | {"scale": "fp32"} | dict.fromkeys(strides, "i32")
    constants = {"STRIDE_STATE": STRIDE, "H": HEADS, "K": DIM, "V": DIM, "Q": 8, "BV": rows}
    constants["LOWER_BOUND"] = -5.0
    unaligned = {*strides, "k_ptr", "v_ptr", "beta_ptr"} if odd else set()
    return compiled(verify_kernel, types, constants, unaligned)


def main() -> None:
    found = {}
    for odd in (False, True):
        kind = "odd" if odd else "aligned"
        found[f"stock {kind}"] = described(stock(odd))
        for rows in (8, 16):
            found[f"verify {kind} {rows}"] = described(verify(odd, rows))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
