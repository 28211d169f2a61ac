"""The recipes for a vLLM that is not installed, resolved with that release's source and parser."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from tests.support.serving import environment
from tests.upstream.conftest import release
from vllm_overlay.folders import find_folders
from vllm_overlay.resolve import Request, Resolution, resolve

RECOVERSSM = {"use-replayssm": True, "mamba-backend": "triton", "mamba-cache-mode": "align"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder, models that look servable, and what 0.33.0 imports and 0.32.0 did not."""
    place = tmp_path_factory.mktemp("place")
    model = place / "models" / "kimi-k3-mxfp4"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    (place / "orjson.py").touch()
    return place


def resolved(place: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> Resolution:
    tree = release("0.33.0")
    monkeypatch.setattr("vllm_overlay.resolve.installed_tree", lambda cache: tree)
    environ = environment(place / "home", {"VLLM_TARGET_DEVICE": "cpu"})
    environ["PYTHONPATH"] = os.pathsep.join([str(tree.root), str(place)])
    folders = dataclasses.replace(find_folders(environ), models=place / "models")
    return resolve(Request("kimi-k3", variant, (), environ, folders))


@pytest.mark.parametrize("variant", ["tp16-dcp8", "exact", "tp16-dcp8-stock"])
def test_kimi_k3(place: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolved(place, variant, monkeypatch)
    assert found.errors == ()
    verdicts = {fix.name: fix.verdict for fix in found.plan.fixes}
    serve = found.plan.serve
    assert (serve["tensor-parallel-size"], serve["decode-context-parallel-size"]) == (16, 8)
    assert serve["speculative-config"]["num_speculative_tokens"] == 4
    assert serve["speculative-config"]["method"] == "dspark"
    if variant != "tp16-dcp8-stock":
        assert verdicts["kimi-k3-replayssm"] == "upstreamed"
        assert verdicts["kimi-k3-deferred-recoverssm"] == "apply"
        values = {fix.name: fix.value for fix in found.plan.fixes}
        assert values["kimi-k3-deferred-recoverssm"] == ("flush" if variant == "exact" else "1")
        assert RECOVERSSM.items() <= serve.items()
    else:
        assert not [name for name in verdicts if name.startswith("kimi-k3-")]
        assert (RECOVERSSM | {"use-replayssm": False}).items() <= serve.items()
