"""Resolving against a package that poses as vLLM: what is refused before there is a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.pose import Pose, pose
from vllm_overlay import resolve as resolving
from vllm_overlay.errors import ConfigError, ConfigErrors
from vllm_overlay.folders import Folders
from vllm_overlay.resolve import Request, Resolution

ENVS = "environment_variables = {'VLLM_PORT': lambda: None}\n"


class Desk:
    """Recipes and fixes of a test, resolved against the posing vLLM."""

    def __init__(self, folder: Path, posed: Pose) -> None:
        self.folder, self.posed = folder, posed
        for name in ("recipes", "fixes", "models"):
            (folder / name).mkdir(parents=True)
        (posed.root / "vllm/envs.py").write_text(ENVS)

    def fix(self, name: str, **body: Any) -> None:
        """Write a fix that is on for this vLLM and adds one module."""
        manifest = {
            "schema": 1,
            "name": name,
            "summary": "for a test",
            "source": "this test",
            "vllm": ">=0.1.0",
            "modules": {f"vllm.{name.replace('-', '_')}": "new.py"},
            **body,
        }
        place = self.folder / "fixes" / name
        place.mkdir()
        (place / "new.py").write_text("")
        (place / "fix.yaml").write_text(yaml.safe_dump(manifest))

    def resolve(
        self, *extra: str, environ: dict[str, str] | None = None, **body: Any
    ) -> Resolution:
        """Resolve a recipe with these keys and the flags after ``--``."""
        recipe = {"schema": 1, "name": "r", "vllm": "0.1.0", "model": "org/m", **body}
        (self.folder / "recipes/r.yaml").write_text(yaml.safe_dump(recipe))
        places = {name: self.folder / name for name in ("recipes", "fixes", "models")}
        folders = Folders(home=self.folder / "home", source="environment", **places)
        environment = {"PYTHONPATH": str(self.posed.root), "POSE_LOG": str(self.posed.log)}
        request = Request("r", None, extra, {**environment, **(environ or {})}, folders)
        return resolving.resolve(request)

    def refusal(self, *extra: str, environ: dict[str, str] | None = None, **body: Any) -> str:
        """Return the lines in which a recipe is refused before there is a plan."""
        with pytest.raises((ConfigError, ConfigErrors)) as caught:
            self.resolve(*extra, environ=environ, **body)
        return str(caught.value)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    posed = pose(tmp_path, monkeypatch)
    monkeypatch.setattr(resolving, "installed_tree", lambda _: posed.tree)
    return Desk(tmp_path, posed)


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
