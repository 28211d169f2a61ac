"""Fixtures of the tests that need no vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.desk import Desk
from tests.support.fake_server import FakeServer, fake_server
from tests.support.node import Node
from tests.support.pose import pose
from tests.support.sandbox import Sandbox, make_sandbox
from vllm_overlay import resolve

EXPECT = [{"prompt": "What is the capital of France?", "contains": "Paris"}]


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """A Python environment with the overlay and a made-up vLLM."""
    return make_sandbox(tmp_path / "env")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


@pytest.fixture
def node(tmp_path: Path, server: FakeServer) -> Node:
    return Node(tmp_path, port=int(server.url.rpartition(":")[2]), expect=EXPECT)


@pytest.fixture
def engine(node: Node) -> Iterator[int]:
    """The pid of EngineCore of a whole server: its API server and a worker run too."""
    with (
        node.process("VLLM::APIServer_0") as root,
        node.process("VLLM::EngineCore") as engine,
        node.process("VLLM::Worker"),
    ):
        node.write_run(root)
        yield engine


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    posed = pose(tmp_path, monkeypatch)
    monkeypatch.setattr(resolve, "installed_tree", lambda _: posed.tree)
    return Desk(tmp_path, posed)
