"""Resolving against a package that poses as vLLM: what is refused before there is a plan."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.desk import Desk
from vllm_overlay.errors import ConfigError, ConfigErrors


@pytest.mark.parametrize(
    ("serve", "named"),
    [
        ({"compilation-config": {"free": {"secret_key": "s3cret"}}}, "free.secret_key"),
        ({"speculative-config": '{"a": {"hf_token": "s3cret"}}'}, "speculative-config.a.hf_token"),
        ({"allowed-origins": [{"password": "s3cret"}]}, "allowed-origins.password"),
        ({"speculative-config": {"access-key-id": ["s3cret"]}}, "access-key-id"),
        ({"speculative-config": {"Authorization": "Bearer s3cret"}}, "Authorization"),
        ({"middleware": ["https://user:s3cret@host/x"]}, "middleware"),
        ({"no-such-flag-token": "s3cret"}, "no-such-flag-token"),
        ({"speculative-config": {"url": "redis://:s3cret@host"}}, "speculative-config.url"),
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_shown(
    desk: Desk, serve: dict[str, Any], named: str
) -> None:
    text = desk.refusal(serve=serve)
    assert "s3cret" not in text
    (line,) = [line for line in text.splitlines() if f"{named}'" in line]
    assert line.startswith(f"{desk.folder}/recipes/r.yaml:") and "environment" in line


@pytest.mark.parametrize(
    "extra",
    [
        ("--speculative-config", '{"secret_key": "s3cret"}'),
        ("--speculative-config.a.secret_key", "s3cret"),
        ("--middleware=http://user:s3cret@host",),
        ("--max-model-len", "http://user:s3cret@host"),  # a wrong value is shown, its login is not
    ],
)
def test_a_secret_after_the_recipe_is_refused_and_not_shown(
    desk: Desk, extra: tuple[str, ...]
) -> None:
    try:
        text = "\n".join(map(str, desk.resolve(*extra).errors))
    except (ConfigError, ConfigErrors) as error:
        text = str(error)
    assert text and "s3cret" not in text
    assert any(line.startswith("command line: ") for line in text.splitlines())


@pytest.mark.parametrize("environ", [{}, {"HTTPS_PROXY": "http://user:s3cret@proxy"}])
def test_a_login_in_a_variable_of_the_recipe_is_refused(
    desk: Desk, environ: dict[str, str]
) -> None:
    value = "http://proxy" if environ else "http://user:s3cret@proxy"
    text = desk.refusal(environ=environ, env={"HTTPS_PROXY": value})
    assert "HTTPS_PROXY" in text and "s3cret" not in text
    assert text.startswith("environment: " if environ else f"{desk.folder}/recipes/r.yaml:")


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token_id": 2, "bos_token_id": [1, 2]},
        {"pad_token": "<pad>", "mask_token": "[MASK]"},
        {"num_speculative_tokens": 3, "tokenizer": "a"},
        {"url": "http://host/a@b", "mail": "a@b"},
    ],
)
def test_what_only_sounds_like_a_secret_is_taken(desk: Desk, config: dict[str, Any]) -> None:
    errors = desk.resolve(serve={"allowed-origins": [config]}).errors
    assert [str(error) for error in errors if "secret" in str(error)] == []


@pytest.mark.parametrize(("fixes", "environ"), [(["taken"], {}), ([], {"VLLM_PORT": "1"})])
def test_a_flag_that_is_vllm_s_own_variable_is_refused(
    desk: Desk, fixes: list[str], environ: dict[str, str]
) -> None:
    desk.fix("taken", flag="VLLM_PORT")
    (line,) = [
        str(e) for e in desk.resolve(environ=environ, fixes=fixes).errors if "flag" in str(e)
    ]
    assert line.startswith(f"{desk.folder}/fixes/taken/fix.yaml:")
    assert "the flag VLLM_PORT of the fix taken is a variable of vLLM's own" in line


def test_a_flag_of_a_fix_that_nobody_chose_may_be_vllm_s_own(desk: Desk) -> None:
    desk.fix("taken", flag="VLLM_PORT")
    assert "VLLM_PORT" not in str(desk.resolve().errors)


def test_a_broken_fix_that_the_recipe_does_not_name_says_why_it_stops_it(desk: Desk) -> None:
    desk.fix("good", flag="VLLM_GOOD")
    desk.fix("broken", vllm="later")
    line, why = desk.refusal(fixes=["good"]).splitlines()
    assert line.startswith(f"{desk.folder}/fixes/broken/fix.yaml:")
    assert "while broken cannot be read, although r does not name it: its flag is not known" in why
    assert "repair it, or move it elsewhere" in why
    assert len(desk.refusal(fixes=["broken"]).splitlines()) == 1
