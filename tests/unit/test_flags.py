"""Serve flags against a parser that is small enough to read, in a package that poses as vLLM."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.pose import Pose, pose
from vllm_overlay import infocache
from vllm_overlay.errors import ConfigError, ConfigErrors
from vllm_overlay.extraflags import parse_extra
from vllm_overlay.flags import Override, check_argv, check_serve, merge, to_argv
from vllm_overlay.flagvalues import size
from vllm_overlay.parsertable import ParserTable, parser_table


@pytest.fixture
def posed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pose:
    return pose(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ParserTable:
    with pytest.MonkeyPatch.context() as patch:
        made = pose(tmp_path_factory.mktemp("pose"), patch)
        return parser_table(made.tree, made.home, os.environ)


def at(path: tuple[str, ...]) -> SimpleNamespace:
    return SimpleNamespace(file="r.yaml", line=len(path) + 1, column=".".join(("serve", *path)))


def refused(table: ParserTable, **serve: object) -> list[str]:
    return [str(error) for error in check_serve(serve, table, at)]


def refusal(table: ParserTable, *argv: str) -> str:
    with pytest.raises((ConfigError, ConfigErrors)) as caught:
        parse_extra(argv, table)
    return str(caught.value)


# --- the table ---


def test_the_parser_is_asked_once_without_the_plan(
    posed: Pose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OVERLAY_PLAN", "/a/plan.json")
    first = parser_table(posed.tree, posed.home, os.environ)
    assert parser_table(posed.tree, posed.home, os.environ) == first
    assert posed.imports == ["no plan"]
    assert first.by_string["--tensor-parallel-size"] is first.by_string["-tp"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"options": []}', '{"options": [{"dest": 1}]}'])
def test_a_cache_that_is_not_whole_is_made_again(posed: Pose, text: str) -> None:
    first = parser_table(posed.tree, posed.home, os.environ)
    (cached,) = (posed.home / "info").iterdir()
    cached.write_text(text)
    assert parser_table(posed.tree, posed.home, os.environ) == first
    assert json.loads(cached.read_text())["options"]


def test_another_tree_or_device_is_asked_again(
    posed: Pose, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser_table(posed.tree, posed.home, os.environ)
    serve = posed.root / "vllm/entrypoints/cli/serve.py"
    serve.write_text(serve.read_text().replace('"--port"', '"--harbour"'))
    infocache.tree_identity.cache_clear()
    assert "--harbour" in parser_table(posed.tree, posed.home, os.environ).by_string
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "other")
    parser_table(posed.tree, posed.home, os.environ)
    assert len(posed.imports) == 3


def test_a_folder_that_cannot_be_written_is_no_error(posed: Pose) -> None:
    posed.home.write_text("a file where the folder should be")
    assert "--port" in parser_table(posed.tree, posed.home, os.environ).by_string


def test_a_parser_that_cannot_be_loaded_says_why(posed: Pose) -> None:
    (posed.root / "vllm/entrypoints/cli/serve.py").write_text("import no_such_module")
    with pytest.raises(ConfigError, match=r"cannot be loaded.*No module named 'no_such_module'"):
        parser_table(posed.tree, posed.home, os.environ)


def test_another_vllm_on_the_path_is_refused(posed: Pose, tmp_path: Path) -> None:
    other = Pose(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"another vLLM.*found {posed.root}/vllm.*PYTHONPATH"):
        parser_table(other.tree, other.home, os.environ)


def test_modules_of_this_package_do_not_stand_in_for_others(posed: Pose) -> None:
    """The dump runs by path, and Python would put its folder first on sys.path."""
    with (posed.root / "vllm" / "__init__.py").open("a") as file:
        file.write("import importlib.util\nassert importlib.util.find_spec('flags') is None\n")
    assert parser_table(posed.tree, posed.home, os.environ).by_string


# --- what is refused ---


def test_good_flags_pass(table: ParserTable) -> None:
    serve = {
        "headless": False,
        "enable-x": False,
        "tensor_parallel_size": 2,
        "device-memory": 1,
        "dtype": "auto",
        "max-model-len": "32k",
        "served-model-name": ["a", "b"],
        "sizes": [1, 2],
        "compilation-config": {"mode": 3, "pass_config": {"fuse": True}, "free": {"any": 1}},
        "speculative-config": {"method": "mtp", "num-speculative-tokens": 7},
        "allowed-origins": ["*"],
        "backend": "A-B",  # vLLM makes a choice of it
    }
    assert check_serve(serve, table, at) == []


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        ({"prot": 1}, r"r.yaml:2:serve.prot: unknown flag 'prot' .*did you mean 'port'"),
        ({"tensor_paralel_size": 1}, "did you mean 'tensor-parallel-size'"),
        ({"tp": 1}, "did you mean 'tensor-parallel-size'"),
        ({"--port": 1}, "unknown flag '--port' .*did you mean 'port'"),
        ({"tensor-parallel": 2}, "unknown flag"),  # argparse would take the abbreviation
        ({"wholly-unlike": 1}, "--help=all"),
        ({"hf-tokn": 1}, "did you mean 'token'"),  # 'hf-token' is nearer, and no help
        ({"tensor-parallel-size": "four"}, "'tensor-parallel-size'; found 'four'; .*whole number"),
        ({"tensor-parallel-size": True}, "found true; expected a whole number"),
        ({"tensor-parallel-size": 1.5}, "found 1.5; expected a whole number"),
        ({"tensor-parallel-size": None}, "found nothing"),
        ({"tensor-parallel-size": [1]}, "whole number"),
        ({"gpu-memory": "most"}, "found 'most'; expected a number"),
        ({"dtype": "bfloat"}, "auto, bfloat16, float16; did you mean 'bfloat16'"),
        ({"max-model-len": "32q"}, "such as 4096, 32k or 1M"),
        ({"served-model-name": [1.1]}, "found 1.1; expected text; write it in quotes"),
        ({"served-model-name": []}, "an empty list"),
        ({"served-model-name": ["a", "-b"]}, "does not begin with '-'"),
        ({"sizes": [1]}, "found 1 values; expected 2 values"),
        ({"headless": "yes"}, "found 'yes'; expected true or false"),
        ({"enable-x": 1}, "found 1; expected true or false"),
        ({"no-enable-x": "no"}, "expected true or false"),
        ({"compilation-config": "{"}, "a mapping, or JSON text"),
        (
            {"enable-x": True, "no_enable_x": True},
            "given twice, as 'enable-x' and as 'no_enable_x'",
        ),
        ({"gpu_memory": 1, "device-memory": 1}, "keep one, written 'gpu-memory'"),
        (
            {"compilation-config": {"mod": 1}},
            r"r.yaml:3:serve.compilation-config.mod: unknown key 'mod'.*did you mean 'mode'",
        ),
        (
            {"compilation-config": {"pass_config": {"fus": 1}}},
            r"r.yaml:4:serve.compilation-config.pass_config.fus: .*did you mean 'fuse'",
        ),
        ({"speculative-config": '{"metod": "mtp"}'}, "did you mean 'method'"),
        ({"model": "x"}, "the recipe's 'model' key"),
        ({"config": "x"}, "write its flags under 'serve'"),
        ({"api_key": "x"}, "set VLLM_API_KEY in the environment"),
        ({"hf-token": "x"}, "set HF_TOKEN in the environment"),
    ],
)
def test_a_flag_that_vllm_would_not_take(
    table: ParserTable, serve: dict[str, object], message: str
) -> None:
    (error,) = refused(table, **serve)
    assert re.search(message, error), error


def test_every_flag_is_told_at_once(table: ParserTable) -> None:
    assert len(refused(table, prot=1, dtype="x", headless=3)) == 3


# --- the command line ---


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        (["--port", "9000"], {"port": 9000}),
        (["--port=9000"], {"port": 9000}),
        (["-tp", "2"], {"tensor-parallel-size": 2}),
        (["-tp=2"], {"tensor-parallel-size": 2}),
        (["--tensor_parallel_size", "2"], {"tensor-parallel-size": 2}),
        (["--port", "-1"], {"port": -1}),
        (["--no-enable-x", "--headless"], {"enable-x": False, "headless": True}),
        (["--served-model-name", "a", "b", "--headless"], None),
        (["--served-model-name=a"], {"served-model-name": ["a"]}),
        (["--middleware", "a", "--middleware=b"], {"middleware": ["a", "b"]}),
        (["--compilation-config", '{"mode": 1}'], {"compilation-config": {"mode": 1}}),
        (["-O3"], {"optimization-level": "3"}),
        (["-O=3"], {"optimization-level": "3"}),
        (["-O", "3"], {"optimization-level": "3"}),
        (["--dtype=auto"], {"dtype": "auto"}),
        (["--token"], {"token": True}),
        (["--token", "x"], {"token": "x"}),
        ([], {}),
    ],
)
def test_the_command_line_is_read_as_vllm_reads_it(
    table: ParserTable, argv: list[str], flags: dict[str, object] | None
) -> None:
    expected = {"served-model-name": ["a", "b"], "headless": True} if flags is None else flags
    assert parse_extra(argv, table) == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "command line: unknown flag '--prot' .*did you mean 'port'"),
        (["--tensor-par", "1"], "unknown flag"),
        (["model"], "command line: 'model' belongs to no flag"),
        (["--port", "1", "stray"], "'stray' belongs to no flag"),
        (["--", "--port"], "'--' belongs to no flag"),
        (["--port"], "found nothing; expected a value"),
        (["--port", "--headless"], "found nothing"),
        (["--port", "x"], "found 'x'; expected a whole number"),
        (["--dtype", "floot16"], "did you mean 'float16'"),
        (["--headless=true"], "found 'true'; expected no value"),
        (["--port", "1", "--port", "2"], "flag 'port' is given twice"),
        (["--enable-x", "--no-enable-x"], "flag 'enable-x' is given twice"),
        (["--sizes", "1"], "expected 2 values"),
        (["--compilation-config", '{"mod": 1}'], "unknown key 'mod'"),
        (["--compilation-config.mod", "1"], "command line: unknown key 'mod'.*mean 'mode'"),
        (["--compilation-config.", "1"], "no part of a flag"),
        (["--port.a", "1"], "no part of a flag that takes JSON"),
        (["--compilation-config.mode"], "found nothing"),
        (["-cc.mode", "1", "--compilation-config", "{}"], "given twice"),
        (["-cc", "{}", "-cc.mode", "1"], "as a whole and by parts"),
        (["--model", "x"], "flag 'model' is not taken here"),
        (["--config=x"], "flag 'config' is not taken here"),
    ],
)
def test_a_command_line_that_is_refused(table: ParserTable, argv: list[str], message: str) -> None:
    assert re.search(message, refusal(table, *argv))


@pytest.mark.parametrize("argv", [["--api-key", "s3cret"], ["--hf-token=s3cret"]])
def test_a_secret_on_the_command_line_is_refused_and_not_shown(
    table: ParserTable, argv: list[str]
) -> None:
    message = refusal(table, *argv)
    assert "in the environment" in message
    assert "s3cret" not in message


def test_every_fault_of_a_command_line_is_told_at_once(table: ParserTable) -> None:
    message = refusal(table, "--prot", "1", "--headless", "--dtype", "x")
    assert len(message.splitlines()) == 2


# --- the recipe and the command line together ---


def test_the_command_line_wins_and_says_what_it_replaced(table: ParserTable) -> None:
    recipe = {"port": 8000, "tensor_parallel_size": 4, "enable-x": True, "dtype": "auto"}
    extra = parse_extra(["-tp", "2", "--no-enable-x", "--headless", "--dtype", "auto"], table)
    merged, overrides = merge(recipe, extra, table)
    assert merged == {
        "port": 8000,
        "tensor-parallel-size": 2,
        "enable-x": False,
        "dtype": "auto",
        "headless": True,
    }
    assert overrides == [
        Override("tensor-parallel-size", 4, 2),
        Override("enable-x", True, False),
    ]


def test_a_mapping_is_replaced_whole_unless_it_is_given_by_parts(table: ParserTable) -> None:
    old = {"mode": 1, "custom_ops": ["a"], "pass_config": {"fuse": False}}
    recipe = {"compilation_config": old}
    whole, replaced = merge(recipe, parse_extra(["-cc", '{"mode": 2}'], table), table)
    assert whole == {"compilation-config": {"mode": 2}}
    assert replaced == [Override("compilation-config", old, {"mode": 2})]

    argv = ["-cc.mode=3", "--compilation_config.pass_config.fuse", "true", "-cc.custom_ops+", "b,c"]
    argv += ["-cc.free.limit", "80g"]
    parts, replaced = merge(recipe, parse_extra(argv, table), table)
    assert parts["compilation-config"] == {
        "mode": 3,
        "custom_ops": ["a", "b", "c"],
        "pass_config": {"fuse": True},
        "free": {"limit": 80_000_000_000},
    }
    assert [item.flag for item in replaced] == [
        "compilation-config.mode",
        "compilation-config.pass_config.fuse",
        "compilation-config.custom_ops",
    ]
    assert old == {"mode": 1, "custom_ops": ["a"], "pass_config": {"fuse": False}}


@pytest.mark.parametrize("argv", [["-cc.free.x.y", "1"], ["-cc.mode+", "1"]])
def test_a_part_of_what_has_no_parts_is_refused(table: ParserTable, argv: list[str]) -> None:
    recipe = {"compilation-config": {"mode": 1, "free": {"x": 1}}}
    with pytest.raises(ConfigError, match="no such part"):
        merge(recipe, parse_extra(argv, table), table)


def test_flags_that_are_refused_anyway_do_not_stop_the_merge(table: ParserTable) -> None:
    merged, _ = merge({"prot": 1, "port": "x"}, parse_extra(["--headless"], table), table)
    assert merged == {"prot": 1, "port": "x", "headless": True}


# --- arguments for vLLM ---


@pytest.mark.parametrize(
    ("serve", "argv"),
    [
        ({"headless": True}, ["--headless"]),
        ({"headless": False}, []),
        ({"enable-x": False}, ["--no-enable-x"]),
        ({"no-enable-x": True}, ["--no-enable-x"]),
        ({"no_enable_x": False}, ["--enable-x"]),
        ({"port": "9"}, ["--port=9"]),
        ({"device_memory": 0.5}, ["--gpu-memory=0.5"]),
        ({"served-model-name": "-a"}, ["--served-model-name=-a"]),
        ({"served-model-name": ["a", "b"]}, ["--served-model-name", "a", "b"]),
        ({"middleware": ["a", "b"]}, ["--middleware=a", "--middleware=b"]),
        ({"compilation-config": {"mode": 1}}, ['--compilation-config={"mode": 1}']),
        ({"compilation-config": '{"mode":1}'}, ['--compilation-config={"mode": 1}']),
        ({"allowed-origins": ["*"]}, ['--allowed-origins=["*"]']),
        ({"token": True}, ["--token"]),
    ],
)
def test_arguments(table: ParserTable, serve: dict[str, object], argv: list[str]) -> None:
    assert check_serve(serve, table) == []
    assert to_argv(serve, table) == argv


def test_vllm_has_the_last_word_and_its_yes_is_kept(posed: Pose) -> None:
    def ask(*argv: str) -> list[str]:
        return [str(e) for e in check_argv("m", argv, posed.tree, posed.home, os.environ, at)]

    assert ask("--port=1") == ask("--port=1") == []
    assert len(posed.imports) == 1
    assert ask("--headless", "--port=1") == [
        "r.yaml:1:serve: vLLM refuses the flags: headless has no port"
    ]
    assert ask("--headless", "--port=1")
    assert len(posed.imports) == 3
    (error,) = ask('--speculative-config={"')
    assert error.startswith(
        "r.yaml:2:serve.speculative-config: vLLM refuses flag 'speculative-config': invalid"
    )


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("2k", 2000), ("2K", 2048), ("1.5m", 1_500_000), ("1T", 2**40)]
)
def test_sizes(text: str, number: int) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5K", "1kk", "1.5"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        size(text)
