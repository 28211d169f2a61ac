"""The image's entrypoint, with a stand-in for the vllm-overlay command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).resolve().parents[2] / "entrypoint.sh"
LISTENS = ["--", "--host", "0.0.0.0", "--port", "8000"]


class Started:
    """What the entrypoint called, and how it ended. The first word is the callee's pid."""

    def __init__(self, tmp_path: Path, *arguments: str, **env: str) -> None:
        stand_in = tmp_path / "vllm-overlay"
        stand_in.write_text('#!/bin/sh\nfor word in $$ "$@"; do echo "$word"; done\nexit 78\n')
        stand_in.chmod(0o755)
        process = subprocess.Popen(
            [ENTRYPOINT, *arguments],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stdout, self.stderr = process.communicate()
        self.words = stdout.splitlines()
        self.pid, self.status = process.pid, process.returncode


@pytest.mark.parametrize(
    ("arguments", "env", "called"),
    [
        ((), {"RECIPE": "demo"}, ["serve", "demo", *LISTENS]),
        ((), {"RECIPE": "a b", "VARIANT": ""}, ["serve", "a b", *LISTENS]),
        (
            (),
            {"RECIPE": "demo", "VARIANT": "tp 2"},
            ["serve", "demo", "--variant", "tp 2", *LISTENS],
        ),
        (
            ("--", "--seed", "9", "a b"),
            {"RECIPE": "demo"},
            ["serve", "demo", *LISTENS, "--seed", "9", "a b"],
        ),
        (("--",), {"RECIPE": "demo"}, ["serve", "demo", *LISTENS]),
        (("plan", "demo", "--json"), {}, ["plan", "demo", "--json"]),
        (("serve", "x", "--", "--y"), {"RECIPE": "demo"}, ["serve", "x", "--", "--y"]),
    ],
)
def test_what_is_called(
    tmp_path: Path, arguments: tuple[str, ...], env: dict[str, str], called: list[str]
) -> None:
    started = Started(tmp_path, *arguments, **env)
    assert started.words[1:] == called
    assert started.status == 78  # the command's own


@pytest.mark.parametrize("arguments", [(), ("--",), ("--", "--port", "9")])
@pytest.mark.parametrize("env", [{}, {"RECIPE": ""}])
def test_without_a_recipe_it_says_so_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], env: dict[str, str]
) -> None:
    started = Started(tmp_path, *arguments, **env)
    assert started.status == 2
    assert started.words == []
    assert started.stderr == "RECIPE is not set: name a recipe, for example RECIPE=demo\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--port", "9"], "--port"),
        (["--seed", "1", "--port=9"], "--port"),
        (["--host", "::1"], "--host"),
        (["--host=::1"], "--host"),
    ],
)
def test_the_address_of_the_container_is_fixed_and_says_so(
    tmp_path: Path, words: list[str], named: str
) -> None:
    """vLLM would say only that the flag is given twice."""
    started = Started(tmp_path, "--", *words, RECIPE="demo")
    assert started.status == 2
    assert started.words == []
    assert started.stderr.startswith(f"{named} is fixed in the container (0.0.0.0:8000)")
    assert "PORT" in started.stderr and started.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [(), ("status",)])
def test_the_command_takes_the_place_of_the_entrypoint(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """A shell that stays would keep SIGTERM from vLLM."""
    started = Started(tmp_path, *arguments, RECIPE="demo")
    assert started.words[0] == str(started.pid)
