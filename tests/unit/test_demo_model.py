"""The demo's model appears whole or not at all; the real conversion is in tests/engine."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from vllm_overlay.demo import model
from vllm_overlay.errors import ConfigError


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Stand in for the conversion: it writes one file and is recorded."""
    done: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        done.append(target)
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(model, "convert", convert)
    monkeypatch.setattr(model, "gguf_folder", lambda: tmp_path)
    return done


def test_a_present_model_is_kept(conversions: list[Path], tmp_path: Path) -> None:
    folder = model.make_model(tmp_path / "models")
    assert (folder / "config.json").is_file()
    assert model.make_model(tmp_path / "models") == folder
    assert len(conversions) == 1


def test_a_broken_conversion_leaves_no_model(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(model, "convert", killed)
        with pytest.raises(KeyboardInterrupt):
            model.make_model(tmp_path)
    assert not (tmp_path / model.NAME).exists()
    folder = model.make_model(tmp_path)
    assert (folder / "config.json").read_text() == "{}"


def test_two_makers_at_once_convert_once(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_convert, convert = threading.Barrier(2), model.convert

    def slow(source: Path, target: Path) -> None:
        with suppress(threading.BrokenBarrierError):
            both_convert.wait(0.5)  # nobody comes, if one waits for the other
        convert(source, target)

    def make() -> None:
        model.make_model(tmp_path)

    monkeypatch.setattr(model, "convert", slow)
    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(conversions) == 1


def test_a_folder_that_cannot_be_written_is_refused(
    conversions: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written") as refused:
        model.make_model(tmp_path / "file" / "models")
    assert "VLLM_OVERLAY_MODELS" in str(refused.value)


def test_a_missing_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="not installed"):
        model.make_model(tmp_path)
