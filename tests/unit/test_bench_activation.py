"""The three cases of bench/activation.py are what it says they are."""

from __future__ import annotations

import pytest

from bench import activation

LOADED = "import sys; print(*sorted(name for name in sys.modules if 'overlay' in name))"
FIRST_FINDER = "import sys; print(getattr(sys.meta_path[0], '__module__', ''))"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[activation.Case]:
    return activation.cases(tmp_path_factory.mktemp("bench"))


def test_without_a_plan_nothing_of_the_overlay_is_loaded(cases: list[activation.Case]) -> None:
    bare, idle, _ = cases
    assert bare.run(LOADED) == idle.run(LOADED) == "\n"


def test_with_a_plan_the_finder_is_first(cases: list[activation.Case]) -> None:
    assert cases[2].run(FIRST_FINDER).startswith("vllm_overlay.activate")
    assert "vllm_overlay.activate" in cases[2].run(LOADED).split()


def test_it_prints_a_row_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert activation.main(["--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("x 1.0")
