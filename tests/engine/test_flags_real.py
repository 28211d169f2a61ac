"""Serve flags and variables against the parser and the source of the vLLM that is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_overlay.environ import check_env, known_env
from vllm_overlay.extraflags import parse_extra
from vllm_overlay.flags import check_argv, check_serve, merge, to_argv
from vllm_overlay.parsertable import ParserTable, parser_table
from vllm_overlay.upstream import Tree, installed_tree

# Parses one argv a line, so that a property needs one import of vLLM.
PARSE = """
import json, os, sys
out = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(prog="vllm")
cmd_init()[0].subparser_init(parser.add_subparsers(dest="subparser"))
for line in sys.stdin:
    try:
        answer = vars(parser.parse_args(json.loads(line)))
    except (SystemExit, Exception):
        answer = {"refused": True}
    print(json.dumps(answer, default=str), file=out, flush=True)
"""


ENVIRONMENT = os.environ | {"VLLM_TARGET_DEVICE": "cpu"}  # as the demo's recipe sets it


class RealParser:
    """vLLM's own serve parser in a process that stays."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.asked: IO[str] = process.stdin
        self.told: IO[str] = process.stdout

    def parse(self, argv: list[str]) -> dict[str, Any]:
        self.asked.write(json.dumps(["serve", "a-model", *argv]) + "\n")
        self.asked.flush()
        answer: dict[str, Any] = json.loads(self.told.readline())
        return answer


@pytest.fixture(scope="module")
def real() -> Iterator[RealParser]:
    environ = ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PARSE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
    ) as process:
        yield RealParser(process)
        process.kill()


@pytest.fixture(scope="module")
def tree() -> Tree:
    return installed_tree()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def table(tree: Tree, home: Path) -> ParserTable:
    return parser_table(tree, home, ENVIRONMENT)


def defaults(real: RealParser) -> dict[str, Any]:
    return real.parse([])


# --- the table ---


def test_the_table_knows_every_option_of_the_parser(table: ParserTable, real: RealParser) -> None:
    given = {name.replace("_", "-") for name in defaults(real)} - {"subparser", "model-tag"}
    assert given <= {*table.names()}
    assert len(given) > 200


@pytest.mark.parametrize(
    ("string", "what"),
    [
        ("--headless", {"truth": {"--headless": True}}),
        ("--enable-prefix-caching", {"type": "any"}),
        ("-tp", {"name": "tensor-parallel-size", "type": "int"}),
        ("--gpu-memory-utilization", {"type": "float"}),
        ("--served-model-name", {"nargs": "+"}),
        ("--max-model-len", {"type": "size-or-auto"}),
        ("--max-num-batched-tokens", {"type": "size"}),
        ("--hf-overrides", {"type": "json-or-str"}),
        ("--middleware", {"append": True}),
        ("--allowed-origins", {"type": "json", "fields": None}),
    ],
)
def test_options_are_told_for_what_they_are(
    table: ParserTable, string: str, what: dict[str, object]
) -> None:
    option = table.by_string[string]
    assert {name: getattr(option, name) for name in what} == what


def test_a_table_and_a_verdict_are_asked_of_vllm_only_once(
    tree: Tree, home: Path, table: ParserTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_argv("m", ["--port=9000"], tree, home, ENVIRONMENT) == []
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        parser_table(tree, home, ENVIRONMENT)
    monkeypatch.undo()
    monkeypatch.setattr(subprocess, "run", None)
    assert parser_table(tree, home, ENVIRONMENT) == table
    assert check_argv("m", ["--port=9000"], tree, home, ENVIRONMENT) == []


# --- what is refused before vLLM starts, and what vLLM itself says ---


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        ({"tensor-paralel-size": 2}, "did you mean 'tensor-parallel-size'"),
        ({"tensor-parallel-size": "two"}, "a whole number"),
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"speculative-config": {"metod": "mtp"}}, "did you mean 'method'"),
        ({"compilation-config": {"cudagraph_mod": "NONE"}}, "did you mean 'cudagraph_mode'"),
        ({"compilation-config": {"pass_config": {"fuse_nrm": True}}}, "'fuse_nrm'"),
    ],
)
def test_a_faulty_flag_is_refused(
    table: ParserTable, serve: dict[str, object], message: str
) -> None:
    (error,) = check_serve(serve, table)
    assert message in str(error)


def test_a_value_that_only_vllm_can_judge(
    table: ParserTable, tree: Tree, home: Path, real: RealParser
) -> None:
    serve = {"compilation-config": {"cudagraph_mode": "NO_SUCH_MODE"}}
    assert check_serve(serve, table) == []
    argv = to_argv(serve, table)
    assert real.parse(argv) == {"refused": True}
    (error,) = check_argv("m", argv, tree, home, ENVIRONMENT)
    assert "vLLM refuses flag 'compilation-config'" in str(error)
    assert "NO_SUCH_MODE" in str(error)


def test_flags_that_need_each_other(table: ParserTable, tree: Tree, home: Path) -> None:
    argv = to_argv({"enable-auto-tool-choice": True}, table)
    (error,) = check_argv("m", argv, tree, home, ENVIRONMENT)
    assert "--enable-auto-tool-choice requires --tool-call-parser" in str(error)


# --- what we write is what vLLM reads ---

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), min_size=1, max_size=12)
PLAIN = WORDS.filter(lambda text: not text.startswith("-"))
SCALARS = st.one_of(st.booleans(), st.integers(-(2**31), 2**31), WORDS, st.none())
OBJECTS = st.dictionaries(WORDS, SCALARS | st.lists(SCALARS) | st.dictionaries(WORDS, SCALARS))
VALUES: dict[str, st.SearchStrategy[object]] = {
    "tensor-parallel-size": st.integers(-9, 10**6),
    "gpu-memory-utilization": st.floats(-1, 1, allow_nan=False),
    "port": st.integers(0, 65535),
    "seed": st.integers(-(2**31), 2**31),
    "tokenizer": WORDS,
    "chat-template": WORDS.filter(lambda text: text != "None"),
    "dtype": st.sampled_from(["auto", "bfloat16", "float16"]),
    "enforce-eager": st.booleans(),
    "enable-prefix-caching": st.booleans(),
    "enable-log-requests": st.booleans(),
    "headless": st.booleans(),
    "disable-log-stats": st.booleans(),
    "optimization-level": st.sampled_from(["0", "1", "2", "3"]),
    "served-model-name": st.lists(PLAIN.filter(lambda text: text != "None"), min_size=1),
    "cudagraph-capture-sizes": st.lists(st.integers(-512, 512), min_size=1),
    "middleware": st.lists(WORDS, min_size=1),
    "allowed-origins": st.lists(WORDS),
    "override-generation-config": OBJECTS,
    "speculative-config": st.fixed_dictionaries({"method": WORDS, "model": WORDS}),
    "hf-overrides": OBJECTS | PLAIN.filter(lambda text: "{" not in text),
}


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(serve=st.fixed_dictionaries({}, optional=VALUES))
def test_vllm_reads_back_what_we_write(
    table: ParserTable, real: RealParser, serve: dict[str, object]
) -> None:
    assert check_serve(serve, table) == []
    argv = to_argv(serve, table)
    parsed = real.parse(argv)
    assert parsed["model_tag"] == "a-model"
    read = {key: parsed[key.replace("-", "_")] for key in serve}
    assert read == serve
    # The command line means to us what it means to vLLM.
    assert merge({}, parse_extra(argv, table), table)[0] == {
        key: value for key, value in serve.items() if value is not False or f"--no-{key}" in argv
    }


@pytest.mark.parametrize(
    "argv",
    [
        ["-tp", "2", "-O3", "--no-enable-prefix-caching"],
        ["--tensor_parallel_size=2", "--served_model_name", "a", "b", "--enforce-eager"],
        ["--middleware", "a", "--middleware", "b"],
        ["--hf-overrides.a.b", "1k", "--hf-overrides.c+", "x,y", "--hf-overrides.c+=z"],
        ["--override-generation-config.temperature=0.5", "--seed", "-1"],
    ],
)
def test_both_read_the_command_line_alike(
    table: ParserTable, real: RealParser, argv: list[str]
) -> None:
    ours, _ = merge({}, parse_extra(argv, table), table)
    theirs, standard = real.parse(argv), defaults(real)
    changed = {name for name in theirs if theirs[name] != standard[name]}
    assert {name.replace("-", "_"): value for name, value in ours.items()} == {
        name: theirs[name] for name in changed
    }


# --- the environment ---


def test_known_names_of_the_real_vllm(tree: Tree, tmp_path: Path) -> None:
    names = known_env(tree, tmp_path)
    asked = "import json, vllm.envs as e; print(json.dumps(sorted(e.environment_variables)))"
    listed = subprocess.run(
        [sys.executable, "-P", "-c", asked], capture_output=True, text=True, check=True
    )
    registered = json.loads(listed.stdout.splitlines()[-1])
    assert {name for name in registered if name.startswith("VLLM_")} <= names
    # Read through os.environ alone, so vLLM itself would warn of it.
    assert "VLLM_SNAPSHOT_TIMEOUT_S" in names - {*registered}
    (error,) = check_env({"VLLM_USE_V2_MODEL_RUNER": "1"}, names, ())
    assert "did you mean 'VLLM_USE_V2_MODEL_RUNNER'" in str(error)
