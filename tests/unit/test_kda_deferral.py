"""What the deferred commits share: which rows must not defer, who has left a slot."""

from __future__ import annotations

import itertools
from types import ModuleType, SimpleNamespace

import pytest

from vllm_overlay.kda.owners import Owners, is_dummy


@pytest.fixture(scope="module")
def boundary() -> ModuleType:
    pytest.importorskip("torch")
    from vllm_overlay.kda import boundary

    return boundary


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


def test_only_a_request_that_is_added_right_after_it_left_is_a_stream() -> None:
    owners = Owners()
    assert owners.enter("a", 3) is None and owners.enter("b", 1) is None
    owners.leave("a")
    assert owners.enter("a", 2) == 3
    owners.leave("a")  # preempted
    owners.leave("b")
    assert owners.enter("a", 0) is None
    owners.leave("new")  # what the runner does before it adds any request
    assert owners.enter("new", 4) is None
    owners.leave("a")
    owners.leave("a")
    assert owners.enter("a", 0) is None


def test_a_batch_without_a_prompt_is_a_dummy() -> None:
    np = pytest.importorskip("numpy")
    for prompts, dummy in (([0, 0], True), ([0, 5], False)):
        assert is_dummy(SimpleNamespace(prefill_len_np=np.array(prompts))) is dummy
    assert not is_dummy(SimpleNamespace())
