"""What `serve` does before it becomes vLLM, on a state folder and with plans of its own."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.node import Node
from vllm_overlay import launch
from vllm_overlay.activate.receipt import process_key
from vllm_overlay.errors import ConfigError
from vllm_overlay.recipe_format import CACHE_VARIABLES

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_overlay"
DEAD = 999_999_999  # above every pid of Linux


def test_the_cache_folders_are_listed_once() -> None:
    """Two lists would drift: a recipe could then set what `serve` takes from the cache key."""
    for name in CACHE_VARIABLES:
        quoted = re.compile(rf"\"{name}\"")
        files = [file.name for file in PACKAGE.rglob("*.py") if quoted.search(file.read_text())]
        assert files == ["recipe_format.py"]


def dead_receipt(node: Node, start: int, host: str) -> Path:
    """Write the receipt of a process that is dead here; another host may have it alive."""
    path = node.write_receipt(os.getppid(), pid=DEAD, start=start, host=host)
    return path.rename(path.with_name(f"{DEAD}-{start}.json"))


def test_a_start_removes_only_what_this_host_s_dead_processes_left(node: Node) -> None:
    here = os.uname().nodename
    kept = [
        dead_receipt(node, 2, "another-node"),
        node.write_failure(DEAD, 2, "of another node", host="another-node"),
        node.write_run(os.getpid()),
        node.write_receipt(os.getpid()),
    ]
    gone = [
        dead_receipt(node, 1, here),
        node.write_failure(DEAD, 1, "of an earlier start", host=here),
        node.write_failure(DEAD, 3, "without a host"),
        node.folder / "runs" / f"{DEAD}-4.json",
        node.folder / "receipts" / f"{os.getpid()}-{process_key()[1] - 1}.json",  # a reused pid
    ]
    for path in gone[-2:]:
        path.write_text("{")
    launch._clean(node.folder)
    assert [path for path in kept if not path.exists()] == []
    assert [path for path in gone if path.exists()] == []


def test_what_cannot_be_removed_is_refused_by_name(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = node.write_failure(DEAD, 1, "of an earlier start")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(ConfigError, match="cannot be removed") as caught:
        launch._clean(node.folder)
    text = str(caught.value)
    assert str(path) in text and "Read-only file system" in text and "VLLM_OVERLAY_HOME" in text


@pytest.mark.parametrize(
    ("failures", "waits"),
    [
        ([], None),
        ([{"at": 100.0}, {"at": 970.0}, {"at": 940.5}], 30),
        ([{"at": 900.0}], None),
        ([{"at": 5000.0}], 60),  # the clock was set back
        ([{}], None),
        ([{"at": 990.0, "lost": True}], None),  # only its group had ended
        ([{"at": 990.0, "host": "another-node"}], None),
    ],
)
def test_a_refused_node_tries_again_a_minute_later(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failures: list[dict[str, object]],
    waits: int | None,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(launch, "time", SimpleNamespace(time=lambda: 1000.0, sleep=slept.append))
    for start, failure in enumerate(failures):
        node.write_failure(DEAD, start, f"why {start}", **failure)
    launch.rest(node.folder)
    assert slept == ([] if waits is None else [waits])
    said = f"this node was refused (why {len(failures) // 2}); it tries again in {waits} s"
    assert (said in capsys.readouterr().err) == (waits is not None)
