"""The image is built once, and one node serves from it while the tests look at it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import compose
from tests.support.serving import MODELS
from vllm_overlay.demo.model import make_model

IMAGE = "vllm-overlay:test-cpu"
PROJECT = f"vllm-overlay-test-{os.getpid()}"


@pytest.fixture(scope="session")
def image() -> str:
    """The CPU image; the demo's model lies where the compose files look for it."""
    make_model(MODELS)
    compose.build_cpu(IMAGE)
    return IMAGE


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what boxes find out about the image's vLLM; not each need do so anew."""
    folder = tmp_path_factory.mktemp("info")
    folder.chmod(0o777)  # they run as another user
    return folder


@pytest.fixture(scope="session")
def node(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[compose.Node]:
    """A node that nothing has been started on yet; removed with its state at the end."""
    created = compose.node(tmp_path_factory.mktemp("checkout"), PROJECT, image)
    try:
        yield created
    finally:
        created.compose("down", "--volumes", "--timeout", "10", check=False, RECIPE="any")
