"""`plan` and `serve` against the installed vLLM: what they show, and what they refuse."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fixes import write_fix, write_recipe
from tests.support.serving import COMMAND, cli, environment, free_port

KEYS = {
    "digest",
    "cache_key",
    "vllm",
    "model",
    "serve",
    "env",
    "fixes",
    "overrides",
    "recipe",
    "folders",
}
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state folder: what vLLM's parser knows is asked once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def refused(home: Path) -> Refused:
    """Run a command that must be refused in clear lines; return them."""

    def run(*arguments: str, status: int = 78, **env: str) -> str:
        done = cli(*arguments, home=home, env=env)
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        lines = done.stderr.splitlines()
        assert lines and all(line.startswith("vllm-overlay: ") for line in lines), done.stderr
        assert not list(home.glob("plans/*")), "a refused launch left a plan"
        return done.stderr

    return run


def test_the_demo_plan(home: Path) -> None:
    done = cli("plan", "demo", "--json", home=home)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert set(plan) >= KEYS
    verdicts = {fix["name"]: fix["verdict"] for fix in plan["fixes"]}
    assert verdicts == {"truncate-to-fit": "apply", "overlay-route": "apply"}
    assert plan["env"]["VLLM_TRUNCATE_TO_FIT"] == "1"
    assert plan["cache_key"] in plan["env"]["VLLM_CACHE_ROOT"]
    assert not list(home.glob("plans/*")), "plan only shows"


def test_a_plan_is_the_same_twice_and_readable_as_a_table(home: Path) -> None:
    first, second = (json.loads(cli("plan", "demo", "--json", home=home).stdout) for _ in "ab")
    assert first == second
    table = cli("plan", "demo", home=home)
    assert "truncate-to-fit" in table.stdout and "\x1b[" not in table.stdout


def test_a_flag_in_the_environment_wins(home: Path) -> None:
    stock = {"VLLM_TRUNCATE_TO_FIT": "0"}
    plan = json.loads(cli("plan", "demo", "--json", home=home, env=stock).stdout)
    (fix,) = [item for item in plan["fixes"] if item["name"] == "truncate-to-fit"]
    assert (fix["verdict"], fix["value"], fix["value_from"]) == ("off", "0", "environment")
    assert "vllm.entrypoints.openai.responses.protocol" not in plan["modules"]
    other = json.loads(cli("plan", "demo", "--json", home=home).stdout)
    assert other["cache_key"] != plan["cache_key"]


def test_a_flag_turns_on_what_the_recipe_does_not_list(home: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    on = {"VLLM_OVERLAY_ROUTE": "1"}
    plan = json.loads(cli("plan", str(recipe), "--json", home=home, env=on).stdout)
    assert [(fix["name"], fix["verdict"]) for fix in plan["fixes"]] == [("overlay-route", "apply")]


def test_extra_flags_win_by_key_and_are_reported(home: Path) -> None:
    done = cli("plan", "demo", "--json", "--", "--max-model-len", "512", "--seed=3", home=home)
    plan = json.loads(done.stdout)
    assert plan["serve"]["max-model-len"] == 512 and plan["serve"]["seed"] == 3
    assert plan["serve"]["served-model-name"], "a flag that was not given stays"
    assert plan["overrides"] == [{"flag": "max-model-len", "recipe": 2048, "now": 512}]


def test_a_variable_of_the_recipe_set_outside_is_reported(home: Path) -> None:
    env = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    plan = json.loads(cli("plan", "demo", "--json", home=home, env=env).stdout)
    assert plan["env"]["VLLM_CPU_KVCACHE_SPACE"] == "2"
    override = {"flag": "env VLLM_CPU_KVCACHE_SPACE", "recipe": "1", "now": "2"}
    assert plan["overrides"] == [override]


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (["demo"], {"VLLM_TRUNCATE_TO_FITT": "1"}, "did you mean 'VLLM_TRUNCATE_TO_FIT'?"),
        (["demo"], {"VLLM_LOGING_LEVEL": "INFO"}, "did you mean 'VLLM_LOGGING_LEVEL'?"),
        (["demo"], {"VLLM_OVERLAY_ROUTE": "yes"}, "expected 0 or 1"),
        (["demo"], {"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND"),
        (["demo", "--", "--max-modellen", "3"], {}, "max-model-len"),
        (["demo", "--", "--max-model-len", "many"], {}, "max-model-len"),
        (["demo", "--", "--api-key", "s3cret"], {}, "VLLM_API_KEY"),
        (["demmo"], {}, "did you mean 'demo'?"),
        (["demo", "--variant", "hubb"], {}, "did you mean 'hub'?"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "serve"])
def test_refusals(
    refused: Refused, command: str, arguments: list[str], env: dict[str, str], says: str
) -> None:
    text = refused(command, *arguments, **env)
    assert says in text and "s3cret" not in text


def test_every_reason_at_once(refused: Refused, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        vllm="0.33.0",
        model="/no/such/model",
        fixes=["truncate-to-fitt"],
        serve={"max-modellen": 3},
        env={"VLLM_NO_USAGE_STATTS": "1"},
    )
    text = refused("serve", str(recipe))
    for says in ("another vLLM", "/no/such/model", "truncate-to-fit'?", "max-model-len", "STATS'?"):
        assert says in text, text
    assert all(f"{recipe}:" in line for line in text.splitlines())


def test_a_port_in_use(refused: Refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused("serve", "demo", "--", "--port", str(port))


def test_a_refused_serve_tells_a_program(home: Path) -> None:
    done = cli("serve", "demmo", "--json", home=home)
    assert done.returncode == 78 and "'demo'" in json.loads(done.stdout)["errors"][0]


def test_what_the_recipe_requires(refused: Refused, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, requires={"gpus": 64})
    assert "requires.gpus" in refused("serve", str(recipe))


def test_what_a_fix_needs(refused: Refused, tmp_path: Path) -> None:
    needs = [{"serve": "speculative-config", "present": True, "why": "it verifies drafts"}]
    hook = {"vllm.sampling_params": "hooks.py:install"}
    code = "def install(module):\n    return {}\n"
    write_fix(tmp_path / "fixes", "needy", {"hooks.py": code}, hooks=hook, needs=needs)
    recipe = write_recipe(tmp_path, fixes=["needy"])
    text = refused("serve", str(recipe), VLLM_OVERLAY_FIXES=str(tmp_path / "fixes"))
    assert "speculative-config" in text and "it verifies drafts" in text


def test_a_diff_that_does_not_match(refused: Refused, tmp_path: Path) -> None:
    diff = "--- a/vllm/sampling_params.py\n+++ b/vllm/sampling_params.py\n@@ -1 +1 @@\n-old\n+new\n"
    edits = {"vllm.sampling_params": "x.diff"}
    write_fix(tmp_path / "fixes", "stale", {"x.diff": diff}, edits=edits)
    recipe = write_recipe(tmp_path, fixes=["stale"])
    text = refused("serve", str(recipe), VLLM_OVERLAY_FIXES=str(tmp_path / "fixes"))
    assert "incompatible" in text and "vllm.sampling_params" in text


def test_a_broken_fix_folder(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "fixes" / "empty").mkdir(parents=True)
    recipe = write_recipe(tmp_path)
    text = refused("plan", str(recipe), VLLM_OVERLAY_FIXES=str(tmp_path / "fixes"))
    assert "fix.yaml" in text and "empty" in text


def test_a_vllm_that_shadows_the_installed_one(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    text = refused("serve", "demo", PYTHONPATH=str(tmp_path))
    assert str(tmp_path) in text and "PYTHONPATH" in text


def test_a_state_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    port = str(free_port())
    done = cli("serve", "demo", "--", "--port", port, home=tmp_path / "file" / "home")
    assert done.returncode == 78, done.stderr
    assert done.stderr.count("\n") == 1 and "VLLM_OVERLAY_HOME" in done.stderr


def test_a_full_state_folder(home: Path) -> None:
    arguments = ["demo", "--", "--port", str(free_port())]
    assert cli("plan", *arguments, home=home).returncode == 0  # what vLLM's parser says is known
    done = subprocess.run(
        [COMMAND, "serve", *arguments],
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
        # How a full disk looks to one process: no file may grow.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    assert done.returncode == 78, done.stderr
    assert "Traceback" not in done.stderr and "free space" in done.stderr
    assert not list(home.glob("plans/*/plan.json"))


def test_wrong_usage_is_status_2(home: Path) -> None:
    for arguments in (["plan"], ["plan", "demo", "--jsson"], ["serv", "demo"]):
        done = cli(*arguments, home=home)
        assert done.returncode == 2 and "Traceback" not in done.stderr
