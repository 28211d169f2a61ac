"""Writes recipes for a test, loads them, and shows how they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_overlay.errors import EXIT_CONFIG, ConfigError, ConfigErrors
from vllm_overlay.recipe import Recipe, load_recipe

HEAD = 'schema: 1\nname: r\nvllm: "0.33.0"\nmodel: m\n'


def write(folder: Path, name: str, text: str) -> Path:
    """Write a recipe's file."""
    file = folder / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def load(folder: Path, name: str = "r", variant: str | None = None) -> Recipe:
    """Load a recipe of a folder."""
    return load_recipe(name, folder=folder, variant=variant)


def refusals(folder: Path, name: str = "r", variant: str | None = None) -> list[str]:
    """Return the refusals of a recipe, with its folder left out of their places."""
    with pytest.raises((ConfigError, ConfigErrors)) as caught:
        load(folder, name, variant)
    error = caught.value
    assert isinstance(error, ConfigError | ConfigErrors)
    assert error.exit_code == EXIT_CONFIG
    return str(error).replace(f"{folder}/", "").splitlines()
