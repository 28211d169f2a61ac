"""Which recipes and fixes are used, and that the plan can say whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_overlay.errors import ConfigError
from vllm_overlay.folders import find_folders, home_folder

REPO = Path(__file__).resolve().parents[2]


def test_a_checkout_uses_its_own_folders(tmp_path: Path) -> None:
    folders = find_folders({"HOME": str(tmp_path)}, tmp_path)
    assert (folders.recipes, folders.fixes) == (REPO / "recipes", REPO / "fixes")
    assert folders.source == "checkout"


def test_mounted_folders_win(tmp_path: Path) -> None:
    for name in ("recipes", "fixes", "models"):
        (tmp_path / name).mkdir()
    folders = find_folders({}, tmp_path)
    assert (folders.recipes, folders.fixes) == (tmp_path / "recipes", tmp_path / "fixes")
    assert (folders.models, folders.source) == (tmp_path / "models", "mounted")


def test_environment_wins_over_mounts(tmp_path: Path) -> None:
    for name in ("recipes", "fixes", "mine"):
        (tmp_path / name).mkdir()
    folders = find_folders({"VLLM_OVERLAY_FIXES": str(tmp_path / "mine")}, tmp_path)
    assert (folders.fixes, folders.source) == (tmp_path / "mine", "environment")


def test_home_is_the_cache_folder_unless_named(tmp_path: Path) -> None:
    assert home_folder({"VLLM_OVERLAY_HOME": "/x"}) == Path("/x")
    assert home_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/vllm-overlay")
    assert home_folder({}) == Path.home() / ".cache/vllm-overlay"


@pytest.mark.parametrize("value", ["relative/path", "/no/such/folder"])
def test_a_folder_variable_that_names_no_folder_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_folders({"VLLM_OVERLAY_FIXES": value}, tmp_path)
    assert "VLLM_OVERLAY_FIXES" in str(caught.value) and "\n" not in str(caught.value)
