"""The real source of vLLM releases, fetched once into the user's state folder."""

from __future__ import annotations

import os

import pytest

from vllm_overlay.errors import ConfigError
from vllm_overlay.folders import home_folder
from vllm_overlay.releases import find_tree
from vllm_overlay.upstream import Tree

RELEASES = ["0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]


def release(version: str) -> Tree:
    try:
        return find_tree(version, home_folder(os.environ))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def old_release() -> Tree:
    return release("0.32.0")


@pytest.fixture(scope="session")
def new_release() -> Tree:
    return release("0.33.0")
