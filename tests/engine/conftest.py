"""Servers that the engine tests share: starting one takes a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.serving import MODELS, Server, serving
from vllm_overlay.demo.model import make_model

OFF = {"VLLM_TRUNCATE_TO_FIT": "0", "VLLM_OVERLAY_ROUTE": "0"}


@pytest.fixture(scope="session", autouse=True)
def demo_model() -> None:
    """The demo model, built once a machine."""
    make_model(MODELS)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo recipe, by a vLLM that refuses variables it does not know. Tests change nothing."""
    home = tmp_path_factory.mktemp("server")
    with serving("demo", home, "--fail-on-environ-validation") as running:
        yield running


@pytest.fixture(scope="session")
def server_without_fixes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo recipe with every fix switched off."""
    with serving("demo", tmp_path_factory.mktemp("stock"), env=OFF) as running:
        yield running
