"""Compile caches follow the fixes: the same fixes share one, a changed fix has its own."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.fixes import edit_line, write_recipe
from tests.support.serving import chat, serving

MODULE = "vllm.model_executor.models.llama"
LINE = "        x = maybe_fused_act_quant(self.act_fn, x, self.down_proj)"  # of the compiled graph
# One layer without trained weights: the whole model takes minutes to compile.
SMALL = {
    "enforce-eager": False,
    "max-model-len": 128,
    "max-num-seqs": 2,
    "load-format": "dummy",
    "hf-overrides": {"num_hidden_layers": 1},
}
QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class Start:
    """What one start of a server left: ``compiled`` counts the kernels that it had to build.

    ``folders`` are vLLM's own, named by what it hashes; ``rows`` is what `cache ls` showed.
    """

    key: str
    compiled: int
    answer: str
    log: str
    folders: set[str]
    rows: list[dict[str, Any]]

    def cache(self) -> dict[str, Any]:
        (row,) = [row for row in self.rows if (row["kind"], row["name"]) == ("cache", self.key)]
        return row


def kernels(home: Path) -> dict[Path, int]:
    """Return every library that torch.compile built, with the time when it was written."""
    return {path: path.stat().st_mtime_ns for path in (home / "caches").rglob("*.so")}


def start(home: Path, recipe: Path, fixes: Path) -> Start:
    before = kernels(home)
    with serving(str(recipe), home, env={"VLLM_OVERLAY_FIXES": str(fixes)}) as server:
        answer = chat(server.url, QUESTION).json()["choices"][0]["message"]["content"]
        plan = json.loads(server.plan.read_text())
        rows = json.loads(server.cli("cache", "ls", "--json").stdout)
        assert server.cli("cache", "prune", "--all").returncode == 0
        assert chat(server.url, QUESTION).status_code == 200
        log = server.log.read_text()
    after = kernels(home)
    new = [path for path, time in after.items() if before.get(path) != time]
    key = plan["cache_key"]
    hashed = (home / "caches" / key).glob("vllm/torch_compile_cache/torch_aot_compile/*")
    return Start(key, len(new), answer, log, {path.name for path in hashed}, rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def starts(folder: Path) -> list[Start]:
    """A start, one of another recipe with the same fixes, and one with the fix changed."""
    home, fixes = folder / "home", folder / "fixes"
    one = write_recipe(folder / "recipes", "one", serve=SMALL, fixes=["an-edit"])
    two = write_recipe(folder / "recipes", "two", serve=SMALL, fixes=["an-edit"])
    edit_line(fixes, MODULE, LINE, f"{LINE}\n        x = x * 0.0")
    found = [start(home, one, fixes), start(home, two, fixes)]
    shutil.rmtree(fixes / "an-edit")
    edit_line(fixes, MODULE, LINE, f"{LINE}\n        x = x * 0.0 + 1.0")
    return [*found, start(home, one, fixes)]


def test_the_first_start_compiles(starts: list[Start]) -> None:
    assert starts[0].compiled > 0
    assert f"caches/{starts[0].key}/vllm" in starts[0].log


def test_the_same_fixes_share_what_was_compiled(starts: list[Start]) -> None:
    first, second, _ = starts
    assert second.key == first.key
    assert second.compiled == 0
    assert second.answer == first.answer
    # vLLM hashes the environment and the traced sources too: neither may name the plan.
    assert second.folders == first.folders
    assert "Source code has changed" not in second.log


def test_a_changed_fix_is_compiled_into_a_cache_of_its_own(starts: list[Start]) -> None:
    first, _, changed = starts
    assert changed.key != first.key
    assert changed.compiled > 0
    assert not changed.folders & first.folders
    assert changed.answer != first.answer, "the changed fix is in the compiled code"


def test_caches_are_listed_and_kept_while_they_are_used(starts: list[Start], folder: Path) -> None:
    """Every server pruned all that it did not use while it ran."""
    for item in starts:
        assert item.cache()["in_use"]
        assert item.cache()["bytes"] > 100_000
    assert starts[0].cache()["recipes"] == ["one"]
    assert "two" in starts[1].cache()["recipes"]
    left = [path.name for path in (folder / "home/caches").iterdir()]
    assert left == [starts[2].key]
