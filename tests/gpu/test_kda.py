"""RecoverSSM of KDA layers against vLLM's stock kernels, bit for bit, at real sizes.

Needs a GPU, and vLLM with the fix applied:
``python -m tests.support.with_fixes glm5next-recoverssm python -m pytest tests/gpu/test_kda.py``
"""

from __future__ import annotations

from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():  # before anything large is imported
    pytest.skip("no GPU", allow_module_level=True)

from tests.support.kda_cases import CASES, Size


@pytest.mark.parametrize("heads", [3, 16, 64])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, heads: int) -> None:
    CASES[name](Size(heads=heads, dim=128, rows=13, steps=6, device="cuda"))
