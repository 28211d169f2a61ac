"""Digests written into a person's fix.yaml: only those lines change."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay import manifest
from vllm_overlay.errors import ConfigError, one_line
from vllm_overlay.yamlio import parse

HEAD = """# why this fix is here
schema: 1
name:   mine   # its name
summary: 'quoted'
source: s
vllm: ">=9"
hooks: {vllm.a: "h.py:go"}
"""
REVIEWED = """reviewed:  # by hand
  # the first release
  "9.8":
    vllm.a:
      f: aaaaaaaa  # what f does

  # the second
  "9.9":
    vllm.a:
      f: bbbbbbbb  # looked at twice
      'g': "cccccccc"
    vllm.b:
      h: dddddddd
# the end of it
"""
TAIL = "upstreamed: {}  # none yet\nneeds: []\n"


def recorded(tmp_path: Path, text: str, release: str, entry: manifest.Entry) -> str:
    file = tmp_path / "fix.yaml"
    file.write_text(text)
    manifest.record(file, release, entry)
    return file.read_text()


def test_a_digest_changes_where_it_stands(tmp_path: Path) -> None:
    entry = {"vllm.a": {"f": "11111111", "g": "22222222"}, "vllm.b": {"h": "dddddddd"}}
    text = recorded(tmp_path, HEAD + REVIEWED + TAIL, "9.9.0", entry)
    expected = (HEAD + REVIEWED + TAIL).replace("bbbbbbbb", '"11111111"')
    assert text == expected.replace('"cccccccc"', '"22222222"')


def test_new_symbols_and_modules_get_lines(tmp_path: Path) -> None:
    entry = {"vllm.a": {"<module>": "a" * 64}, "vllm.c": {"on": "12345678"}}
    text = recorded(tmp_path, HEAD + REVIEWED + TAIL, "9.9", entry)
    expected = HEAD + REVIEWED + TAIL
    symbol = f'      "<module>": {"a" * 64}\n'
    expected = expected.replace("      'g': \"cccccccc\"\n", "      'g': \"cccccccc\"\n" + symbol)
    module = '    vllm.c:\n      "on": "12345678"\n'
    assert text == expected.replace("      h: dddddddd\n", "      h: dddddddd\n" + module)


def test_a_new_release_goes_behind_the_last(tmp_path: Path) -> None:
    text = recorded(tmp_path, HEAD + REVIEWED + TAIL, "9.10", {"vllm.a": {"f": "eeeeeeee"}})
    line = "      h: dddddddd\n"
    added = '  "9.10":\n    vllm.a:\n      f: eeeeeeee\n'
    assert text == (HEAD + REVIEWED + TAIL).replace(line, line + added)


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_first_review(end: str, tmp_path: Path) -> None:
    text = recorded(tmp_path, HEAD.removesuffix("\n") + end, "9.9", {"vllm.a": {"f": "eeeeeeee"}})
    assert text == HEAD + 'reviewed:\n  "9.9":\n    vllm.a:\n      f: eeeeeeee\n'


@pytest.mark.parametrize(
    "line", ["{}", '{"9.9": {vllm.a: {f: bbbbbbbb, g: cccccccc}}}', '\n  "9.9": {vllm.a: {}}']
)
def test_maps_in_braces_become_lines(line: str, tmp_path: Path) -> None:
    before = f"{HEAD}reviewed: {line}  # c\n{TAIL}"
    text = recorded(tmp_path, before, "9.9", {"vllm.a": {"f": "eeeeeeee"}})
    kept = yaml.safe_load(before)["reviewed"].get("9.9", {}).get("vllm.a", {})
    assert yaml.safe_load(text)["reviewed"] == {"9.9": {"vllm.a": {**kept, "f": "eeeeeeee"}}}
    assert text.startswith(HEAD)
    assert text.endswith(f"  # c\n{TAIL}")


def test_a_style_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    text = "{schema: 1, name: mine, summary: s, source: s, vllm: '>=9', hooks: {vllm.a: 'h.py:f'}}"
    with pytest.raises(ConfigError, match="without changing other lines"):
        recorded(tmp_path, text, "9.9", {"vllm.a": {"f": "eeeeeeee"}})
    assert (tmp_path / "fix.yaml").read_text() == text


def test_the_file_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text(HEAD)
    real.chmod(0o640)
    (tmp_path / "fix.yaml").symlink_to(real)
    manifest.record(tmp_path / "fix.yaml", "9.9", {"vllm.a": {"f": "eeeeeeee"}})
    assert "eeeeeeee" in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(file.name for file in tmp_path.iterdir()) == ["fix.yaml", "real.yaml"]


@given(st.text(min_size=1).map(one_line))
def test_any_line_is_read_back(text: str) -> None:
    root, errors = parse(f"k: {manifest.scalar(text)}\n".encode(), Path("x"))
    assert not errors
    assert root is not None
    assert root.plain() == {"k": text}


@pytest.mark.parametrize("text", ["on", "1e5", "0x1f", "null", "a: b", "a #b", "-", "12345678"])
def test_a_word_of_yaml_is_quoted(text: str) -> None:
    assert manifest.scalar(text) == f'"{text}"'
