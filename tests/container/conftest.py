"""The image is built once, and one node serves from it while the tests look at it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support import compose

IMAGE = "vllm-overlay:test-cpu"
PROJECT = f"vllm-overlay-test-{os.getpid()}"


@pytest.fixture(scope="session")
def image() -> str:
    compose.build_cpu(IMAGE)
    return IMAGE


@pytest.fixture(scope="session")
def node(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[compose.Node]:
    """A node that nothing has been started on yet; removed with its state at the end."""
    created = compose.node(tmp_path_factory.mktemp("checkout"), PROJECT, image)
    try:
        yield created
    finally:
        created.compose("down", "--volumes", "--timeout", "10", check=False, RECIPE="any")
