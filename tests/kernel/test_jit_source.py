"""Triton compiles a kernel from its source text: for an edited module, from the edited one."""

from __future__ import annotations

from pathlib import Path

from tests.support.fixes import edit_line
from tests.support.kernels import interpreted
from tests.support.plans import write_fixes_plan

MODULE = "vllm.v1.sample.rejection_sampler"
LINE = "    src_val = tl.where(src_val == replace_from, replace_to, src_val)"
EXPAND = f"""
import tests.support.interpreter  # noqa: F401
import torch
from {MODULE} import expand_kernel
out = torch.zeros(5, dtype=torch.int32)
expand_kernel[(2,)](
    out, torch.tensor([7, 9], dtype=torch.int32), torch.tensor([2, 5], dtype=torch.int32),
    0, 0, MAX_NUM_TOKENS=4,
)
print(out.tolist())
"""


def test_triton_runs_the_edited_kernel(tmp_path: Path) -> None:
    edit_line(tmp_path / "fixes", MODULE, LINE, f"{LINE}\n    src_val = src_val * 10")
    plan = write_fixes_plan(tmp_path / "fixes", tmp_path)
    stock = interpreted("-c", EXPAND, home=tmp_path)
    assert stock.stdout.splitlines()[-1:] == ["[7, 7, 9, 9, 9]"], stock.stderr
    patched = interpreted("-c", EXPAND, home=tmp_path, plan=plan)
    assert patched.stdout.splitlines()[-1:] == ["[70, 70, 90, 90, 90]"], patched.stderr


def test_jit_reads_the_edited_source(tmp_path: Path) -> None:
    """What Triton would compile for a GPU, and what its cache key is made of."""
    edit_line(tmp_path / "fixes", MODULE, LINE, f"{LINE}\n    src_val = src_val * 10")
    plan = write_fixes_plan(tmp_path / "fixes", tmp_path)
    code = (
        f"import tests.support.interpreter\nfrom {MODULE} import expand_kernel\n"
        "from triton.runtime.jit import JITFunction\n"
        "kernel = JITFunction(expand_kernel.fn)\n"
        "print('src_val * 10' in kernel.src, kernel.cache_key)"
    )
    flag, key = interpreted("-c", code, home=tmp_path, plan=plan).stdout.splitlines()[-1].split()
    stock_flag, stock_key = interpreted("-c", code, home=tmp_path).stdout.splitlines()[-1].split()
    assert (flag, stock_flag) == ("True", "False") and key != stock_key
