"""The shared KDA verify's Triton forms against float64, in Triton's interpreter."""

from __future__ import annotations

import json

import pytest

from tests.support.kernels import interpreted, release

NAMES = [
    "nothing_to_verify",
    "the_library_comes_first",
    "checked_and_run",
    *(
        name
        for form in ("chunk", "sequential")
        for name in (f"steep_gates_{form}", *(f"{form}_{size}" for size in range(1, 9)))
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in each case: a traceback, or nothing."""
    home = tmp_path_factory.mktemp("kda")
    module = "tests.support.kda_window_cases"
    done = interpreted("-m", module, home=home, tree=release("0.33.0"))
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in lines)


def test_every_case_has_run(results: dict[str, str]) -> None:
    assert list(results) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_case(results: dict[str, str], name: str) -> None:
    assert not results[name], results[name]
