"""The house rules: style, types, lint of the image's files, and file length."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LONGEST = 420  # lines
LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.splitlines()
FILES = [name for name in LISTED if (ROOT / name).is_file()]
PUBLIC = re.compile(r"fixes/[^/]+/vllm/")  # code of a public diff keeps its own style
PYTHON = [name for name in FILES if name.endswith(".py") and not PUBLIC.match(name)]
SHELL = [name for name in FILES if name == ".ci/run" or name.endswith(".sh")]
IMAGES = [name for name in FILES if Path(name).name.startswith("Dockerfile")]


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy",),
        ("shellcheck", *SHELL),
        ("hadolint", *IMAGES),
    ],
    ids=lambda command: "-".join(command[:2]),
)
def test_linter(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        [BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", PYTHON)
def test_a_file_can_be_read_in_one_go(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= LONGEST


def test_the_image_takes_the_torch_that_make_takes() -> None:
    torch = re.search(r'^TORCH = "torch==(.*?)"', (ROOT / "tools/env.py").read_text(), re.M)
    image = re.search(r"^ARG TORCH_VERSION=(.*)", (ROOT / "Dockerfile").read_text(), re.M)
    assert torch
    assert image
    assert torch[1] == image[1]


@pytest.mark.parametrize(
    "name", sorted(ROOT.glob("requirements-*.lock")), ids=lambda path: path.name
)
def test_every_locked_package_has_a_hash(name: Path) -> None:
    text = name.read_text()
    pinned = re.findall(r"^[a-z].*?==\S+(.*)", text, re.M)
    assert pinned
    assert all(rest.endswith("\\") for rest in pinned)  # its hashes follow on the next lines
    assert "://" not in text  # no registry is named


def test_the_cpu_image_is_locked_to_what_is_tested() -> None:
    pins = [
        set(re.findall(r"^[a-z].*?==\S+", (ROOT / name).read_text(), re.M))
        for name in ("requirements-cpu.lock", "requirements-dev.lock")
    ]
    assert pins[0] <= pins[1]
