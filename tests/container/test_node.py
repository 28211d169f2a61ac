"""One node: the CPU image, started, looked into, stopped and switched with compose.

Every test begins with `up`, which does nothing where that recipe is serving already.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

from tests.support.compose import Node, docker
from tests.support.fixes import write_fix
from tests.support.serving import chat

STATE = "/var/lib/vllm-overlay"
GRACE = 150  # seconds: compose's stop_grace_period

SECOND = """\
schema: 1
name: second
summary: the demo's model under another name, with a fix of this host
extends: demo
serve: {served-model-name: second, max-model-len: 1024}
fixes: +[host-made]
"""
BROKEN = """\
schema: 1
name: broken
extends: demo
serves: {max-model-len: 1024}
"""
HOOK = """\
def install(module):
    module.VLLM_VERSION = "made on the host"
    return {"VLLM_VERSION": module.VLLM_VERSION}
"""


def plans(node: Node, *arguments: str, **env: str) -> dict[str, Any]:
    """Return the plan of a recipe as the service's container resolves it."""
    command = ["run", "--rm", "-T", "serve", "plan", *arguments, "--json"]
    plan: dict[str, Any] = json.loads(node.compose(*command, RECIPE="any", **env).stdout)
    return plan


def test_up_waits_for_a_model_that_answers(node: Node) -> None:
    node.up("demo")
    assert node.inspect("{{.State.Health.Status}}") == "healthy"
    reply = chat(node.url, "What is the capital of France?").json()
    assert "Paris" in reply["choices"][0]["message"]["content"]


def test_smoke_passes_inside(node: Node) -> None:
    node.up("demo")
    started = time.monotonic()
    done = node.exec("vllm-overlay", "smoke")
    assert time.monotonic() - started < 120, done.stdout


def test_vllm_is_the_main_process_and_has_no_privileges(node: Node) -> None:
    node.up("demo")
    assert node.shell("cat /proc/1/comm").stdout == "docker-init\n"
    main = node.shell(
        "for p in $(cat /proc/1/task/1/children); do tr '\\0' ' ' </proc/$p/cmdline; done"
    )
    assert "/opt/venv/bin/vllm serve /models/smollm2-135m-instruct" in main.stdout
    assert len(main.stdout.splitlines()) <= 1
    status = node.shell("cat /proc/[0-9]*/status").stdout.splitlines()
    facts = {tuple(line.split()) for line in status}
    assert {line[1:] for line in facts if line[0] == "Uid:"} == {("10001",) * 4}
    assert {line[1] for line in facts if line[0] in ("CapEff:", "CapBnd:")} == {"0" * 16}
    assert {line[1] for line in facts if line[0] == "NoNewPrivs:"} == {"1"}


def test_doctor_looks_at_the_container(node: Node) -> None:
    """The port is free there: it is a container of its own."""
    command = ("run", "--rm", "-T", "serve", "doctor", "demo", "--json")
    done = node.compose(*command, RECIPE="any", SHM_SIZE="64m")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert [check for check in checks.values() if check["state"] == "fail"] == []
    assert checks["core"]["detail"] == "no core files"
    assert checks["shm"]["state"] == "warn" and "of 0.06 GiB" in checks["shm"]["detail"]


def test_only_state_and_tmp_can_be_written(node: Node) -> None:
    node.up("demo")
    mounts = "for d in /recipes /fixes /models; do touch $d/x 2>/dev/null && echo $d; done"
    found = node.shell(f"find / -xdev -type d -writable 2>/dev/null; {mounts}; true").stdout
    assert sorted(found.split()) == ["/tmp", STATE]  # where other file systems are mounted
    node.shell(f"touch {STATE}/x /tmp/x && rm {STATE}/x /tmp/x")
    ends = node.shell("touch /opt/vllm-overlay/x", check=False)
    assert "Read-only file system" in ends.stderr


def test_the_plan_tells_of_mounts_and_of_the_address(node: Node) -> None:
    node.up("demo")
    served = httpx.get(f"{node.url}/overlay", headers={"Accept": "application/json"}).json()
    plan = json.loads(node.shell(f"cat {STATE}/plans/{served['digest']}/plan.json").stdout)
    assert plan["folders"]["source"] == "mounted"
    assert (plan["folders"]["recipes"], plan["folders"]["fixes"]) == ("/recipes", "/fixes")
    assert {"flag": "host", "recipe": "127.0.0.1", "now": "0.0.0.0"} in plan["overrides"]


def test_without_mounts_the_images_copies_are_used(node: Node) -> None:
    state = f"{node.env['COMPOSE_PROJECT_NAME']}_state:{STATE}"
    models = f"{node.env['MODELS_DIR']}:/models:ro"
    command = ["run", "--rm", "--read-only", "--tmpfs", "/tmp", "-v", state, "-v", models]
    out = docker(*command, node.env["IMAGE"], "plan", "demo", "--json")
    folders = json.loads(out)["folders"]
    assert folders["source"] == "image"
    assert folders["recipes"] == "/opt/vllm-overlay/recipes"
    assert folders["fixes"] == "/opt/vllm-overlay/fixes"


def test_caches_outlive_the_container(node: Node) -> None:
    node.up("demo")
    node.shell(f'test -n "$(find {STATE}/caches -type f)" && touch {STATE}/caches/kept')
    old = node.container()
    node.compose("down", RECIPE="any")
    node.up("demo")
    assert node.container() != old
    node.shell(f"test -f {STATE}/caches/kept")


def test_stop_lets_a_request_finish(node: Node) -> None:
    node.up("demo")
    answer = Streamed(node.url, tokens=600)
    answer.begun.wait(60)
    started = time.monotonic()
    node.compose("stop", RECIPE="any")
    took = time.monotonic() - started
    answer.thread.join(10)
    assert answer.error is None
    assert answer.tokens_after(started) > 10  # it was in flight
    assert (answer.finish, answer.count) == ("length", 600)
    assert took < GRACE
    assert answer.ended - started <= took + 1
    assert node.inspect("{{.State.ExitCode}}") == "0"
    assert node.inspect("{{.State.OOMKilled}}") == "false"


def test_stop_and_start_again_and_again(node: Node) -> None:
    for _ in range(2):
        node.up("demo")
        assert "Paris" in chat(node.url, "What is the capital of France?").text
        node.compose("stop", RECIPE="any")
        assert node.inspect("{{.State.ExitCode}}") == "0"


def test_a_recipe_and_a_fix_made_on_the_host_are_served_next(node: Node) -> None:
    """Another recipe by changing RECIPE only, and no build."""
    node.up("demo")
    image = node.inspect("{{.Image}}")
    (node.checkout / "recipes" / "second.yaml").write_text(SECOND)
    hooks = {"vllm.entrypoints.serve.instrumentator.basic": "hook.py:install"}
    write_fix(node.checkout / "fixes", "host-made", {"hook.py": HOOK}, hooks=hooks)
    assert httpx.get(f"{node.url}/version").json() == {"version": "0.32.0"}
    node.up("second")
    assert httpx.get(f"{node.url}/version").json() == {"version": "made on the host"}
    (model,) = httpx.get(f"{node.url}/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("second", 1024)
    assert node.inspect("{{.Image}}") == image
    node.exec("vllm-overlay", "health")


def test_a_fixs_flag_from_the_env_file_wins(node: Node) -> None:
    env = node.checkout / "compose" / ".env"
    env.write_text("VLLM_OVERLAY_ROUTE=0\n")
    try:
        fixes = {fix["name"]: fix for fix in plans(node, "demo")["fixes"]}
    finally:
        env.unlink()
    assert fixes["overlay-route"]["verdict"] == "off"
    assert fixes["overlay-route"]["value_from"] == "environment"
    assert fixes["truncate-to-fit"]["verdict"] == "apply"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [("dmo", "did you mean 'demo'?"), ("broken", "/recipes/broken.yaml:4:1: unknown key 'serves'")],
)
def test_a_refused_recipe_ends_up_with_78_and_one_line(node: Node, recipe: str, said: str) -> None:
    (node.checkout / "recipes" / "broken.yaml").write_text(BROKEN)
    done = node.compose("up", "--wait", "--no-build", check=False, RECIPE=recipe)
    assert done.returncode != 0
    assert node.inspect("{{.State.ExitCode}}") == "78"
    (line,) = node.compose("logs", "--no-log-prefix", RECIPE="any").stdout.splitlines()
    assert said in line


class Streamed:
    """A long answer, read in a thread; ``begun`` is set with its first token."""

    def __init__(self, url: str, tokens: int) -> None:
        self.begun = threading.Event()
        self.times: list[float] = []
        self.finish: str | None = None
        self.count = 0
        self.ended = 0.0
        self.error: Exception | None = None
        self.request = {
            "model": "demo",
            "prompt": "Once upon a time",
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.thread = threading.Thread(target=self.read, args=(f"{url}/v1/completions",))
        self.thread.start()

    def read(self, url: str) -> None:
        try:
            with httpx.stream("POST", url, json=self.request, timeout=GRACE) as reply:
                for line in reply.iter_lines():
                    self.take(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = error
        self.ended = time.monotonic()

    def take(self, event: str) -> None:
        if not event or event == "[DONE]":
            return
        chunk = json.loads(event)
        self.times.append(time.monotonic())
        self.begun.set()
        for choice in chunk["choices"]:
            self.finish = choice["finish_reason"] or self.finish
        self.count = (chunk.get("usage") or {}).get("completion_tokens", self.count)

    def tokens_after(self, moment: float) -> int:
        return sum(1 for at in self.times if at > moment)
