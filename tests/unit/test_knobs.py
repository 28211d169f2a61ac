"""The list of knobs: complete, current, and with the defaults that the files have."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from vllm_overlay import knobs, schemas
from vllm_overlay.errors import ConfigError
from vllm_overlay.fix_format import FixModel
from vllm_overlay.recipe_format import RecipeModel, VariantModel

ROOT = Path(__file__).resolve().parents[2]


def all_names() -> set[str]:
    return {knob.name for group in knobs.registry() for knob in group.knobs}


def test_the_list_is_current() -> None:
    text = (ROOT / "docs/KNOBS.md").read_text()
    assert text == knobs.render(knobs.registry()), "run `make docs`"


def test_the_schemas_are_current() -> None:
    for file, text in schemas.files(ROOT / "docs").items():
        assert file.read_text() == text, "run `make docs`"


def test_every_variable_of_the_overlay_is_listed() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    code = ("vllm_overlay/", "tools/", "compose/", "fixes/", "Dockerfile", "entrypoint.sh")
    named: set[str] = set()
    for name in listed:
        if name.startswith(code) and (ROOT / name).is_file():
            text = (ROOT / name).read_text(errors="replace")
            named |= set(re.findall(r"\bVLLM_OVERLAY_[A-Z]+(?:_[A-Z]+)*\b(?!_)", text))
    assert "VLLM_OVERLAY_PLAN" in named
    assert named <= all_names()


def test_every_key_of_the_formats_is_listed() -> None:
    names = all_names()
    for model in (RecipeModel, FixModel):
        for name, field in model.model_fields.items():
            assert (field.alias or name) in names
    assert set(VariantModel.model_fields) <= names


def test_defaults_are_read_where_a_knob_is_defined(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("ARG A=1\nARG B=\nFROM x\nARG C\nRUN ARG D=2\n")
    assert knobs.build_arguments(tmp_path / "Dockerfile") == {"A": "1", "B": "", "C": ""}
    (tmp_path / "Makefile").write_text("A ?= x y\nB ?=\nC = 1\n\tD ?= 2\n")
    assert knobs.make_variables(tmp_path / "Makefile") == {"A": "x y", "B": ""}
    (tmp_path / "a.yaml").write_text(
        "x: ${A:-1} # ${NOT}\ny: ${B:?say it}\nz: ${C:-${HOME}/m}\nenvironment:\n  DD:\n  EE: 1\n"
    )
    (tmp_path / "b.yaml").write_text("x: ${A:-2}\n")
    assert knobs.compose_knobs(tmp_path) == {"A": "1 or 2", "B": "", "C": "$HOME/m", "DD": ""}


def test_a_knob_needs_a_meaning_and_a_meaning_a_knob(tmp_path: Path) -> None:
    for name in ("compose", "fixes"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "Makefile").symlink_to(ROOT / "Makefile")
    (tmp_path / "Dockerfile").write_text((ROOT / "Dockerfile").read_text() + "ARG NEW=1\n")
    with pytest.raises(ConfigError, match="the knob 'NEW' has no meaning"):
        knobs.registry(tmp_path)
    text = re.sub(r"(?m)^ARG MAX_JOBS=.*$", "", (ROOT / "Dockerfile").read_text())
    (tmp_path / "Dockerfile").write_text(text)
    with pytest.raises(ConfigError, match="describes 'MAX_JOBS', which is no knob"):
        knobs.registry(tmp_path)


def test_a_default_with_a_bar_stays_in_its_cell() -> None:
    group = knobs.Group("T", "here", (knobs.Knob("a|b", "x|y", "c"),))
    assert r"| `a\|b` | x\|y | c |" in knobs.render([group])
