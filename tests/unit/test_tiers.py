"""The tiers of the test suite: what a machine cannot run is left out by name, or refused in CI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
TEST = "def test_it(): pass\n"


def run_suite(folder: Path, files: list[str], **env: str) -> tuple[int, str]:
    """Run a suite of one-line tests on a machine that has no Docker and no GPU on its PATH."""
    for file in files:
        path = folder / "tests" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEST)
    (folder / "tests" / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "PATH": "/nowhere", "REQUIRE_CONTAINER": "", **env},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def files() -> list[str]:
    return ["container/test_image.py", "gpu/test_kernel.py", "unit/test_recipe.py"]


def test_what_is_left_out_is_named_with_its_reason(tmp_path: Path, files: list[str]) -> None:
    status, out = run_suite(tmp_path, files)
    assert status == 0
    assert "container: no Docker engine answers: tests/container/test_image.py (1 tests)" in out
    assert "gpu: no GPU: tests/gpu/test_kernel.py (1 tests)" in out
    assert re.search(r"=+ 1 passed, 2 skipped, .*=+\n$", out)
    assert out.index("test_recipe") < out.index("test_image") < out.index("test_kernel")


def test_ci_refuses_a_missing_engine(tmp_path: Path, files: list[str]) -> None:
    status, out = run_suite(tmp_path, files, REQUIRE_CONTAINER="1")
    assert status == 1
    assert "no Docker engine answers, and REQUIRE_CONTAINER=1 asks for one" in out
    assert "gpu: no GPU: tests/gpu/test_kernel.py (1 tests)" in out


def test_a_test_outside_the_tiers_is_refused(tmp_path: Path) -> None:
    status, out = run_suite(tmp_path, ["test_stray.py"])
    assert status != 0
    assert "a test lies in one of tests/{unit,upstream,kernel,engine,container,gpu}/" in out
