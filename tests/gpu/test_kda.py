"""RecoverSSM of KDA layers against vLLM's stock kernels, bit for bit, at real sizes.

Needs a GPU, and vLLM with the fix applied: run it through tests/gpu/run.sh.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from tests.support.kda_cases import CASES, Size  # noqa: E402


@pytest.mark.parametrize("heads", [3, 16, 64])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, heads: int) -> None:
    CASES[name](Size(heads=heads, dim=128, rows=13, steps=6, device="cuda"))
