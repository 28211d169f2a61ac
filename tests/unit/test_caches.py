"""What the state folder holds, and what `cache prune` removes: never what a server uses."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.node import BARE, Node, program
from vllm_overlay.caches import DAY, as_json, human, prune, prune_json, prune_lines, survey
from vllm_overlay.caches import survey_table as table
from vllm_overlay.errors import ConfigError
from vllm_overlay.inuse import alone, hold, in_use

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from vllm_overlay.inuse import hold
home, plan = map(Path, sys.argv[2:4])
hold(home, while_serving=False)
hold(plan, while_serving=True)
if sys.argv[4] == "become":
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[5]])
exec(sys.argv[5])
"""
READY = "print('ready', flush=True); import time; time.sleep(600)"


def write_plan(home: Path, letter: str, *, days: float = 0, **changed: Any) -> Path:
    """Write a plan that was last used ``days`` ago, with its cache and its patched source."""
    folder = home / "plans" / (letter * 64)
    key = changed.pop("cache_key", letter * 16)
    store = changed.pop("store", letter * 3)
    body = {
        "recipe": {"name": f"recipe-{letter}", "variant": None},
        "cache_key": key,
        "env": {"VLLM_CACHE_ROOT": f"{home}/caches/{key}/vllm"},
        "modules": {
            "vllm.a": {"source": {"file": f"store/{store}/vllm/a.py"}},
            "vllm.new": {"source": {"file": "/fixes/f/new.py"}},
            "vllm.hooked": {"source": None},
        },
        **changed,
    }
    for path, text in {
        folder / "plan.json": json.dumps(body),
        folder / "lock": "",
        home / "store" / store / "vllm/a.py": "x = 1\n",
        home / "caches" / key / "vllm/torch_compile_cache/abc/model": "y" * 9000,
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    then = time.time() - days * DAY
    for path in (folder / "plan.json", folder / "lock"):
        os.utime(path, (then, then))
    return folder


@contextmanager
def server(home: Path, plan: Path, how: str = "become") -> Iterator[int]:
    """Run a process that locks as `serve` does, and then becomes another program."""
    python = (BARE, "-c", HOLDER, str(ROOT), str(home), str(plan), how, READY)
    with program(*python, env={"PYTHONPATH": ":".join(sys.path)}) as process:
        yield process.pid


def left(home: Path) -> dict[str, list[str]]:
    folders = ("plans", "caches", "store")
    return {name: sorted(path.name[0] for path in (home / name).iterdir()) for name in folders}


def everywhere(*letters: str) -> dict[str, list[str]]:
    return {name: list(letters) for name in ("plans", "caches", "store")}


def test_what_is_there(tmp_path: Path) -> None:
    write_plan(tmp_path, "a", days=3)
    write_plan(tmp_path, "b", days=1, cache_key="a" * 16, store="aaa")
    (tmp_path / "caches/orphan").mkdir()
    (tmp_path / "releases/0.33.0").mkdir(parents=True)
    (tmp_path / "info").mkdir()
    found = {(item.kind, item.name[:1]): item for item in survey(tmp_path)}
    assert list(found) == [
        *(("cache", "a"), ("cache", "o"), ("plan", "a"), ("plan", "b")),
        *(("store", "a"), ("release", "0"), ("info", "i")),
    ]
    cache = found["cache", "a"]
    assert cache.plans == ("a" * 64, "b" * 64)
    assert cache.recipes == ("recipe-a", "recipe-b")
    assert not cache.in_use
    files = [cache.path, *Path(cache.path).rglob("*")]
    assert cache.bytes == sum(os.lstat(file).st_blocks * 512 for file in files) >= 9000
    assert found["store", "a"].plans == cache.plans
    assert found["cache", "o"].plans == ()
    assert found["plan", "a"].elsewhere == ()
    assert time.time() - found["plan", "a"].last_used == pytest.approx(3 * DAY, abs=60)
    row = next(row for row in as_json(survey(tmp_path)) if row["name"] == "a" * 64)
    stamp = time.gmtime(found["plan", "a"].last_used)
    assert row["last_used"] == time.strftime("%Y-%m-%dT%H:%M:%SZ", stamp)


def test_a_link_is_measured_and_removed_as_a_link(tmp_path: Path) -> None:
    home, outside = tmp_path / "home", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("z" * 100_000)
    (home / "caches").mkdir(parents=True)
    (home / "caches/link").symlink_to(outside)
    (home / "store/abc").mkdir(parents=True)
    (home / "store/abc/link").symlink_to(outside)
    assert sum(item.bytes for item in survey(home)) < 50_000
    prune(home, 0)
    assert not list((home / "caches").iterdir())
    assert not list((home / "store").iterdir())
    assert (outside / "precious").is_file()


def test_old_plans_go_with_what_only_they_use(tmp_path: Path) -> None:
    write_plan(tmp_path, "a", days=31)
    write_plan(tmp_path, "b", days=29)
    shared = write_plan(tmp_path, "c", days=31, cache_key="b" * 16, store="bbb")
    removals, _ = prune(tmp_path, 30, dry_run=True)
    assert left(tmp_path) == {**everywhere("a", "b"), "plans": ["a", "b", "c"]}
    assert sum(item.bytes for item in removals) > 9000
    prune(tmp_path, 30)
    assert left(tmp_path) == everywhere("b")
    assert not shared.exists()
    assert prune(tmp_path, 30) == ([], [])
    prune(tmp_path, 0)
    assert left(tmp_path) == everywhere()


def test_what_was_removed_is_what_was_said(tmp_path: Path) -> None:
    write_plan(tmp_path, "a", days=31)
    said = prune(tmp_path, 30, dry_run=True)
    assert prune(tmp_path, 30) == said
    lines = prune_lines(*said, dry_run=True)
    assert lines[0].startswith(f"would remove plan {'a' * 24} (")
    assert "not used for 30 days" in lines[0]
    assert lines[-1] == f"would free {human(sum(item.bytes for item in said[0]))}"
    data = prune_json(*said, dry_run=False)
    assert data["freed_bytes"] == sum(item["bytes"] for item in data["removed"]) > 0
    assert not any(Path(item["path"]).exists() for item in data["removed"])


@pytest.mark.parametrize("how", ["become", "stay"])
def test_what_a_server_uses_stays(tmp_path: Path, how: str) -> None:
    """The lock outlives exec, and needs no record: the server may be in another container."""
    plan = write_plan(tmp_path, "a", days=400)
    write_plan(tmp_path, "b", days=400)
    with server(tmp_path, plan, how):
        assert in_use(plan)
        used = {item.kind: item.in_use for item in survey(tmp_path) if item.name[0] == "a"}
        assert used == {"cache": True, "plan": True, "store": True}
        if how == "become":
            prune(tmp_path, 0)
            assert left(tmp_path) == everywhere("a")
        else:  # it is still on its way to vLLM: what it will write is not known yet
            with pytest.raises(ConfigError, match="the state folder is busy"):
                prune(tmp_path, 0)
            assert left(tmp_path) == everywhere("a", "b")
    assert not in_use(plan)
    prune(tmp_path, 300)
    assert "a" in left(tmp_path)["plans"], "its start just now counts as use"
    prune(tmp_path, 0)
    assert left(tmp_path) == everywhere()


def test_a_server_that_started_long_ago_uses_its_plan_now(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "a")
    with server(tmp_path, plan):
        os.utime(plan / "lock", (0, 0))
        (entry,) = [item for item in survey(tmp_path) if item.kind == "plan"]
        assert entry.last_used == pytest.approx(time.time(), abs=60)


def test_a_server_waits_for_a_removal(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "a")
    python = (BARE, "-c", HOLDER, str(ROOT), str(tmp_path), str(plan), "become", READY)
    environ = {"PYTHONPATH": ":".join(sys.path)}
    with alone(tmp_path):
        process = subprocess.Popen(python, env=environ, stdout=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        assert not in_use(plan)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert in_use(plan)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("record", ["runs", "receipts"])
def test_a_live_process_of_this_node_keeps_its_plan(node: Node, record: str) -> None:
    with node.process("VLLM::EngineCore", receipt=record == "receipts") as pid:
        if record == "runs":
            node.write_run(pid)
        write_plan(node.home, "a")
        (node.folder / "lock").unlink()
        prune(node.home, 0)
        assert left(node.home) == everywhere("a")
    prune(node.home, 0)
    assert left(node.home) == everywhere()


def test_records_of_dead_processes_go(node: Node) -> None:
    with node.process("VLLM::Worker") as pid:
        dead = node.write_receipt(pid)
        other = node.folder / "receipts/77-77.json"
        other.write_text(dead.read_text().replace(os.uname().nodename, "another-node"))
    node.write_failure(5, 5, "no")
    failure = node.folder / "failures/5-5.json"
    with node.process("VLLM::EngineCore") as pid:
        alive = node.write_run(pid)
        write_plan(node.home, "a")
        removals, _ = prune(node.home, 30)
        assert [item.path for item in removals] == [str(dead)]
        assert not dead.exists()
        assert alive.exists()
        assert other.exists(), "that process may live on its node"
        assert failure.exists(), "`health` reports it"
    prune(node.home, 30)
    assert not [path for path in (alive, other, failure) if path.exists()]
    assert (node.folder / "plan.json").is_file()


def test_a_live_plan_that_cannot_be_read_stops_the_removal(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "a")
    write_plan(tmp_path, "b")
    (plan / "plan.json").write_text("{")
    with server(tmp_path, plan), pytest.raises(ConfigError, match="running server") as error:
        prune(tmp_path, 0)
    assert str(plan / "plan.json") in str(error.value)
    assert left(tmp_path) == everywhere("a", "b")
    prune(tmp_path, 0)
    assert left(tmp_path) == everywhere()


def test_caches_elsewhere_are_named_and_left(tmp_path: Path) -> None:
    outside = tmp_path / "triton/key"
    outside.mkdir(parents=True)
    home = tmp_path / "home"
    write_plan(home, "a", env={"TRITON_CACHE_DIR": str(outside)})
    (entry,) = [item for item in survey(home) if item.kind == "plan"]
    assert entry.elsewhere == (str(outside),)
    removals, elsewhere = prune(home, 0)
    assert elsewhere == [str(outside)]
    assert f"left {outside}: it lies outside of the state folder" in prune_lines(
        removals, elsewhere, dry_run=False
    )
    assert outside.is_dir()


def test_no_state_folder_is_nothing_to_do(tmp_path: Path) -> None:
    assert survey(tmp_path / "none") == []
    assert prune(tmp_path / "none", 0) == ([], [])
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_locked_is_left_alone(tmp_path: Path) -> None:
    write_plan(tmp_path, "a")
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match="the state folder cannot be written"):
        prune(tmp_path, 0)
    assert left(tmp_path) == everywhere("a")


def test_a_lock_that_cannot_be_had_stops_no_server(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    hold(tmp_path / "file/plans", while_serving=True)


def test_the_table_and_the_sizes(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "a")
    with server(tmp_path, plan):
        console = Console(width=200, file=io.StringIO(), record=True)
        console.print(table(survey(tmp_path)))
    text = console.export_text()
    assert "recipe-a" in text
    assert "yes" in text
    assert "in all" in text
    sizes = [0, 1023, 1024, 1536 * 1024, 5 * 1024**4]
    assert [human(size) for size in sizes] == ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 TiB"]


def test_the_commands(tmp_path: Path) -> None:
    write_plan(tmp_path, "a", days=31)
    command = [str(Path(sys.executable).parent / "vllm-overlay"), "cache"]
    environ = {"PATH": os.environ["PATH"], "VLLM_OVERLAY_HOME": str(tmp_path)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*command, *words], env=environ, capture_output=True, text=True)
        assert not done.stderr
        assert done.returncode == 0
        return done

    rows = json.loads(run("ls", "--json").stdout)
    assert [row["kind"] for row in rows] == ["cache", "plan", "store"]
    assert rows[0]["recipes"] == ["recipe-a"]
    said = json.loads(run("prune", "--dry-run", "--json").stdout)
    assert [item["kind"] for item in said["removed"]] == ["plan", "cache", "store"]
    assert run("prune", "--unused-for", "32").stdout == "freed 0 B\n"
    assert left(tmp_path) == everywhere("a")
    assert run("prune").stdout.splitlines()[-1] == f"freed {human(said['freed_bytes'])}"
    assert left(tmp_path) == everywhere()
