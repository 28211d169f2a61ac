"""Writes fixes and recipes for a test, reviewed against the vLLM that is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from vllm_overlay.upstream import installed_tree


def write_fix(folder: Path, name: str, files: Mapping[str, str], **manifest: Any) -> Path:
    """Write ``folder/name`` with its files and a manifest; fill in what every fix has.

    ``reviewed`` is filled with every symbol of the modules that edits and hooks name, unless the
    manifest has it.
    """
    tree = installed_tree()
    modules = [*manifest.get("edits", {}), *manifest.get("hooks", {})]
    reviewed = {module: dict(tree.symbols(module)) for module in modules}
    body: dict[str, Any] = {
        "schema": 1,
        "name": name,
        "summary": "for a test",
        "source": "this test",
        "vllm": f"=={tree.release}",
        "reviewed": {tree.release: reviewed},
        **manifest,
    }
    if not reviewed:
        body.pop("reviewed")
    place = folder / name
    place.mkdir(parents=True)
    for file, text in files.items():
        (place / file).write_text(text)
    (place / "fix.yaml").write_text(yaml.safe_dump(body, sort_keys=False))
    return place


def edit_line(folder: Path, module: str, old: str, new: str, name: str = "an-edit") -> Path:
    """Write a fix that replaces the one line ``old`` of a module of vLLM by ``new``."""
    path = installed_tree().path(module)
    assert path is not None
    lines = path.read_text().splitlines()
    (at,) = [index for index, line in enumerate(lines) if line == old]
    added = new.splitlines()
    file = f"{module.replace('.', '/')}.py"
    diff = [
        f"--- a/{file}",
        f"+++ b/{file}",
        f"@@ -{at},3 +{at},{2 + len(added)} @@",
        f" {lines[at - 1]}",
        f"-{old}",
        *(f"+{line}" for line in added),
        f" {lines[at + 1]}",
    ]
    files = {"x.diff": "\n".join(diff) + "\n"}
    return write_fix(folder, name, files, edits={module: "x.diff"})


def write_recipe(folder: Path, name: str = "mine", **body: Any) -> Path:
    """Write a recipe of the demo model; keys given here win, by key in serve and env."""
    tree = installed_tree()
    serve = {
        "served-model-name": "demo",
        "host": "127.0.0.1",
        "max-model-len": 512,
        "enforce-eager": True,
        **body.pop("serve", {}),
    }
    env = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **body.pop("env", {}),
    }
    recipe = {
        "schema": 1,
        "name": name,
        "summary": "for a test",
        "vllm": tree.release,
        "model": "smollm2-135m-instruct",
        "serve": serve,
        "env": env,
        **body,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path
