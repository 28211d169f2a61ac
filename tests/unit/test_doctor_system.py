"""Checks of memory, files, limits, clock and secrets: each made to fail on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.desk import Desk
from tests.support.looks import GIB, H200, child, look, only, plan_of
from tests.support.models import glm, safetensors, write_model
from vllm_overlay.doctor import memory, model, system
from vllm_overlay.fix import load_fix

MTP = {"speculative-config": {"method": "mtp", "num_speculative_tokens": 7}}
TWO = {"tensor-parallel-size": 2}


@pytest.mark.parametrize(("serve", "state"), [(TWO, "fail"), ({}, "warn")])
def test_docker_s_default_of_shared_memory(serve: dict[str, Any], state: str) -> None:
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    check = only(child(mount, memory.shm, namespace=True, serve=serve), state)
    assert check.detail.startswith("0.06 of 0.06 GiB are free in /dev/shm: ")
    assert "--shm-size" in check.remedy
    more = "mount -t tmpfs -o size=2g tmpfs /dev/shm"
    only(child(more, memory.shm, namespace=True, serve=serve), "ok")
    nodes = {**serve, "nnodes": 2}  # one rank a node
    only(child(mount, memory.shm, namespace=True, serve=nodes), "warn")


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    assert "No such file" in only(memory.shm(look(root=tmp_path)), "fail").detail


def whole(folder: Path, size: int) -> Path:
    """Write a model whose header speaks of ``size`` bytes."""
    write_model(folder)
    (folder / "model.safetensors.index.json").unlink()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    header = {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    (folder / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


def test_weights_that_the_host_s_memory_cannot_hold(tmp_path: Path) -> None:
    folder = str(whole(tmp_path / "m", 2**46))
    check = only(memory.memory(look(plan=plan_of(model=folder))), "fail")
    first, second = check.detail.splitlines()
    assert first.startswith("weights 65536.00 GiB + KV cache 0.00 GiB (VLLM_CPU_KVCACHE_SPACE) = ")
    assert second.endswith("GiB of the host's memory are available")


def test_a_kv_cache_that_the_host_s_memory_cannot_hold(tmp_path: Path) -> None:
    plan = plan_of(model=str(write_model(tmp_path / "m")))
    env = {"VLLM_CPU_KVCACHE_SPACE": "90000"}
    check = only(memory.memory(look(plan=plan, env=env)), "fail")
    assert "KV cache 90000.00 GiB" in check.detail and "VLLM_CPU_KVCACHE_SPACE" in check.remedy
    only(memory.memory(look(plan=plan, env={"VLLM_CPU_KVCACHE_SPACE": "0"})), "ok")


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8388608 kB\n")
    assert memory.available(tmp_path) == 8 * GIB
    group = tmp_path / "sys/fs/cgroup"
    (group / "memory").mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert memory.available(tmp_path) == 8 * GIB
    (group / "memory.max").write_text(f"{2 * GIB}\n")
    assert memory.available(tmp_path) == 2 * GIB
    (group / "memory/memory.limit_in_bytes").write_text(f"{GIB}\n")
    assert memory.available(tmp_path) == GIB


@pytest.mark.parametrize(
    ("serve", "state", "lines"),
    [
        (TWO, "ok", ["weights 200.00 GiB / 2 ranks = 100.00 GiB",
                     "0.92 of 140.00 GiB = 128.80 GiB; less the weights: 28.80 GiB for the rest"]),
        ({}, "fail", ["weights 200.00 GiB / 1 ranks = 200.00 GiB",
                      "0.92 of 140.00 GiB = 128.80 GiB; less the weights: -71.20 GiB for the rest",
                      "does not fit into 0.92 of 140.00 GiB"]),
        ({**TWO, "kv-cache-memory-bytes": "41G"}, "fail",
         ["weights 200.00 GiB / 2 ranks = 100.00 GiB",
          "+ KV cache 41.00 GiB = 141.00 GiB of 140.00 GiB", "does not fit into 140.00 GiB"]),
        ({**TWO, "kv-cache-memory-bytes": "39G"}, "ok",
         ["weights 200.00 GiB / 2 ranks = 100.00 GiB",
          "+ KV cache 39.00 GiB = 139.00 GiB of 140.00 GiB"]),
    ],
)  # fmt: skip
def test_the_sum_of_a_gpu_s_memory(
    tmp_path: Path, serve: dict[str, Any], state: str, lines: list[str]
) -> None:
    plan = plan_of(serve, model=str(whole(tmp_path / "m", 200 * GIB)))
    check = only(memory.memory(look(plan=plan, gpus=[H200, H200])), state)
    assert check.detail.splitlines() == lines


def test_what_is_not_known_is_not_summed(tmp_path: Path) -> None:
    folder = whole(tmp_path / "m", 2**46)
    dummy = plan_of({"load-format": "dummy"}, model=str(folder))
    assert memory.memory(look(plan=dummy)) == []
    assert memory.memory(look(plan=plan_of(model="org/m"))) == []
    (folder / "m.safetensors").rename(folder / "m.bin")
    assert memory.memory(look(plan=plan_of(model=str(folder)))) == []


@pytest.mark.parametrize(
    ("serve", "state", "says"),
    [
        ({"max-num-seqs": 10}, "ok", ""),
        ({"max-num-seqs": 11}, "warn", "set max-num-seqs to 10 or up to 12, or give more"),
        ({"kv-cache-memory-bytes": "64M"}, "fail", "not one request fits"),
        ({"pipeline-parallel-size": 2}, "warn", "look at vLLM's own line"),
    ],
)
def test_states_that_do_not_fit(
    tmp_path: Path, serve: dict[str, Any], state: str, says: str
) -> None:
    whole_serve = {**MTP, "tensor-parallel-size": 4, "kv-cache-memory-bytes": "1G", **serve}
    plan = plan_of(whole_serve, model=str(write_model(tmp_path / "m")))
    check = only(memory.states(look(plan=plan)), state)
    assert says in check.remedy
    if "max-num-seqs" in serve:
        assert check.detail.splitlines()[-2:] == [
            "without RecoverSSM: 18 blocks a request, 22 at its peak: 12 requests fit",
            "with it: 4 blocks a request, 8 at its peak: 56 requests fit",
        ]
        fit = "so 12 requests' states fit, 10 all at their peak"
        assert f"{fit}; max-num-seqs is {serve['max-num-seqs']}" in check.detail


def test_a_fix_that_keeps_one_state_changes_the_sum(desk: Desk) -> None:
    desk.fix("f", needs=[{"fits": "one-state", "why": "of the kernel"}])
    fix = load_fix(desk.folder / "fixes/f")
    serve = {**MTP, "tensor-parallel-size": 4, "kv-cache-memory-bytes": GIB, "max-num-seqs": 28}
    plan = plan_of(serve, model=str(write_model(desk.folder / "models/m")))
    only(memory.states(look(plan=plan, applied=[fix])), "ok")
    only(memory.states(look(plan=plan)), "warn")


def test_states_are_counted_against_the_gpu_where_nothing_pins_the_cache(tmp_path: Path) -> None:
    plan = plan_of({"max-num-seqs": 4096, **MTP}, model=str(write_model(tmp_path / "m")))
    check = only(memory.states(look(plan=plan, gpus=[H200])), "warn")
    older = dataclasses.replace(plan, vllm={"version": "0.32.0"})
    other = "\nvLLM 0.32.0 may count otherwise than 0.33.0"
    assert only(memory.states(look(plan=older, gpus=[H200])), "warn").detail == check.detail + other
    assert "(0.92 of the GPU less the weights)" in check.detail and "so at most" in check.detail
    assert memory.states(look(plan=plan_of(model="org/m"))) == []
    (Path(plan.model) / "config.json").write_text('{"model_type": "llama"}')
    assert memory.states(look(plan=plan)) == []
    (Path(plan.model) / "config.json").write_text(json.dumps(glm(kv_lora_rank=0)))
    assert "kv_lora_rank" in only(memory.states(look(plan=plan)), "fail").detail


def test_a_shard_that_ends_early(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    plan = plan_of(model=str(folder))
    assert only(model.model(look(plan=plan)), "ok").detail == f"{folder}: 2 whole safetensors files"
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(safetensors({"c": 400}, cut=123))
    check = only(model.model(look(plan=plan)), "fail")
    assert check.detail == f"1 of 2 files lack 123 bytes of their tensors ({shard} …)"
    shard.write_bytes(b"<html>")
    assert "no safetensors file" in only(model.model(look(plan=plan)), "fail").detail


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """As in a hub's cache whose blobs are gone: links that lead nowhere."""
    folder = write_model(tmp_path / "m")
    (folder / "vocab.json").symlink_to(tmp_path / "blobs/0")
    check = only(model.model(look(plan=plan_of(model=str(folder)))), "fail")
    assert check.detail == f"1 files of {folder} cannot be read (vocab.json …)"


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer_config.json").unlink()
    plan = plan_of(model=str(folder))
    assert "no chat template" in only(model.model(look(plan=plan)), "warn").detail
    only(model.model(look(plan=plan_of({"chat-template": "/t"}, model=str(folder)))), "ok")
    (folder / "chat_template.jinja").write_text("x")
    only(model.model(look(plan=plan)), "ok")


def test_a_hub_s_model_that_may_not_be_fetched(tmp_path: Path) -> None:
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    plan = plan_of(model="org/m")
    check = only(model.model(look(plan=plan, env=env)), "fail")
    assert check.detail == f"org/m is not in {tmp_path}/hub, and HF_HUB_OFFLINE forbids to fetch it"
    only(model.model(look(plan=plan, env={**env, "HF_HUB_OFFLINE": "0"})), "ok")
    (tmp_path / "hub/models--org--m/snapshots/1").mkdir(parents=True)
    only(model.model(look(plan=plan, env=env)), "ok")


def test_a_state_folder_that_cannot_be_written(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o ro tmpfs {tmp_path}"
    found = child(mount, system.caches, tmp_path / "home/deep", namespace=True)
    check = only(found, "fail")
    assert check.detail == f"the state folder cannot be written: {tmp_path}: Read-only file system"
    (tmp_path / "file").write_text("")
    env = {"TRITON_CACHE_DIR": f"{tmp_path}/file/home/caches/k/triton"}
    check = only(system.caches(look(home=tmp_path / "file/home", env=env)), "fail")
    assert check.detail.startswith("the state folder, TRITON_CACHE_DIR cannot be written: ")
    assert not (tmp_path / "home").exists()
    only(system.caches(look(home=tmp_path / "home")), "ok")
    assert not (tmp_path / "home").exists(), "a check leaves nothing behind"


def test_a_cache_on_a_file_system_that_runs_nothing(tmp_path: Path) -> None:
    caches = tmp_path / "caches"
    caches.mkdir()
    mount = f"mount -t tmpfs -o noexec,size=2g tmpfs {caches}"
    env = {"TRITON_CACHE_DIR": f"{caches}/k/triton"}
    check = only(child(mount, system.caches, tmp_path, namespace=True, env=env), "fail")
    assert "mounted noexec" in check.detail and "TRITON_CACHE_DIR" in check.detail


def test_a_full_cache(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=8m tmpfs {tmp_path}"
    check = only(child(mount, system.caches, tmp_path, namespace=True), "warn")
    assert "0.01 GiB are free" in check.detail and "cache prune" in check.remedy


def test_a_core_file_is_warned_of() -> None:
    check = only(child("ulimit -c 8", system.core), "warn")
    assert "a core file of up to " in check.detail and "core=0" in check.remedy
    only(child("ulimit -c 0", system.core), "ok")


def test_a_clock_that_is_behind(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("")
    os.utime(recipe, (time.time(), time.time() + 7200))
    check = only(system.clock(look(plan=plan_of(file=recipe))), "warn")
    assert check.detail.startswith("the clock is ") and check.detail.endswith(f"time of {recipe}")
    os.utime(recipe)
    only(system.clock(look(plan=plan_of(file=recipe))), "ok")


@pytest.mark.parametrize(("nodes", "state"), [(1, "ok"), (2, "warn")])
def test_a_clock_that_nothing_keeps(
    monkeypatch: pytest.MonkeyPatch, nodes: int, state: str
) -> None:
    monkeypatch.setattr(system, "_synchronised", lambda: False)
    assert only(system.clock(look({"nnodes": nodes})), state).detail == "not synchronised"


@pytest.mark.parametrize(
    ("value", "state"),
    [("", "warn"), ("s3cret\n", "fail"), ("s3 cret", "fail"), ("s3crët", "fail"), ("s3cret", "ok")],
)
def test_a_secret_that_cannot_be_sent_and_is_never_shown(value: str, state: str) -> None:
    check = only(system.secrets(look(env={"HF_TOKEN": value})), state)
    assert "HF_TOKEN" in check.detail
    assert "s3" not in check.detail + check.remedy
