"""The pure part of the fix kimi-k3-deferred-recoverssm: which rows must not defer."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest

FIX = Path(__file__).parents[2] / "fixes" / "kimi-k3-deferred-recoverssm"


@pytest.fixture(scope="module")
def boundary() -> ModuleType:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("under_test", FIX / "boundary.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def near(boundary: ModuleType, end: int, query: int, block: int, window: int) -> bool:
    import torch

    rows = boundary.near_boundary(torch.tensor([end]), torch.tensor([query]), block, window)
    return bool(rows.item())


@pytest.mark.parametrize(("block", "window"), [(32, 3), (40, 5), (64, 8)])
def test_a_row_that_defers_stays_in_its_block_until_it_is_folded(
    boundary: ModuleType, block: int, window: int
) -> None:
    """Whatever is accepted, whatever the next step adds, however late the host's news."""
    deferred = 0
    for computed, query in itertools.product(range(3 * block), range(1, window + 1)):
        for unseen in range(2 * window + 1):
            if not near(boundary, computed + query + unseen, query, block, window):
                deferred += 1
                assert computed // block == (computed + query + window) // block
    assert deferred > 0


def test_the_middle_of_a_block_defers(boundary: ModuleType) -> None:
    assert not near(boundary, end=1000, query=5, block=2304, window=5)


@pytest.mark.parametrize("end", [2304 - 10, 2304, 2304 + 14])
def test_a_boundary_within_two_windows_does_not(boundary: ModuleType, end: int) -> None:
    assert near(boundary, end, query=5, block=2304, window=5)
    assert not near(boundary, 2304 - 11, 5, 2304, 5) and not near(boundary, 2304 + 15, 5, 2304, 5)


def test_a_sequence_that_has_just_begun_does_not_defer(boundary: ModuleType) -> None:
    assert near(boundary, end=14, query=5, block=2304, window=5)
    assert not near(boundary, end=15, query=5, block=2304, window=5)


def test_rows_are_judged_one_by_one(boundary: ModuleType) -> None:
    import torch

    ends, queries = torch.tensor([1000, 2304, 2319]), torch.tensor([1, 5, 5], dtype=torch.int32)
    assert boundary.near_boundary(ends, queries, 2304, 5).tolist() == [False, True, False]
