"""Names that begin with VLLM_: found in a small tree, and judged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_overlay import infocache
from vllm_overlay.environ import OWN_NAMES, check_env, known_env
from vllm_overlay.errors import ConfigError
from vllm_overlay.upstream import Tree

ENVS = """
import os
environment_variables: dict[str, object] = {
    "VLLM_PORT": lambda: os.getenv("VLLM_PORT"),
    "VLLM_USE_V2_MODEL_RUNNER": lambda: True,
    "CUDA_HOME": lambda: None,
}
environment_variables["VLLM_LATER"] = lambda: 1
environment_variables.update({"VLLM_UPDATED": lambda: 1})
environment_variables.setdefault("VLLM_SET_DEFAULT", lambda: 1)
"""
READER = '''
"""A docstring names VLLM_DOCSTRING; so does os.environ["VLLM_QUOTED"]."""
import os
from os import environ, getenv
NAME = "VLLM_BY_CONSTANT"
os.environ["VLLM_ITEM"], os.environ.get("VLLM_GET"), os.getenv("VLLM_GETENV", "VLLM_DEFAULT")
getenv("VLLM_BARE_GETENV"), environ["VLLM_BARE_ITEM"], "VLLM_MEMBER" in os.environ
os.environ[NAME], {}.get("VLLM_IN_A_DICTIONARY"), os.getenv("OTHER_NAME")
'''
READ = ["ITEM", "GET", "GETENV", "BARE_GETENV", "BARE_ITEM", "MEMBER", "BY_CONSTANT"]
KNOWN = frozenset({"VLLM_PORT", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_DP_MASTER_PORT"})


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    infocache.tree_identity.cache_clear()
    package = tmp_path / "site" / "vllm"
    (package / "deep").mkdir(parents=True)
    (package / "envs.py").write_text(ENVS)
    (package / "deep" / "reader.py").write_text(READER)
    (package / "deep" / "template.py").write_text("environ VLLM_X {{ no python }}")
    (package / "_C.so").write_bytes(
        b"\x7fELF\0VLLM_IN_C\0xVLLM_PART_OF\0VLLM_ALSO\0VLLM_NEXT\0VLLM_lower\0"
    )
    (package / "empty.so").touch()
    return Tree(tmp_path / "site", "0.1.0")


def messages(environ: dict[str, str], *flags: str) -> list[str]:
    return [str(error) for error in check_env(environ, KNOWN, flags)]


def test_names_are_those_that_vllm_registers_or_reads(tree: Tree, tmp_path: Path) -> None:
    registered = ["PORT", "USE_V2_MODEL_RUNNER", "LATER", "UPDATED", "SET_DEFAULT"]
    names = [*registered, *READ, "IN_C", "ALSO", "NEXT"]
    assert known_env(tree, tmp_path) == {f"VLLM_{name}" for name in names}


def test_the_scan_is_kept_until_the_tree_changes(tree: Tree, tmp_path: Path) -> None:
    first = known_env(tree, tmp_path)
    (cached,) = (tmp_path / "info").iterdir()
    cached.write_text('["VLLM_FROM_THE_CACHE"]')
    assert known_env(tree, tmp_path) == {"VLLM_FROM_THE_CACHE"}
    for spoilt in ("", "{}", "[]", "[1]"):
        cached.write_text(spoilt)
        assert known_env(tree, tmp_path) == first
    infocache.tree_identity.cache_clear()
    (tree.root / "vllm" / "new.py").write_text("import os; os.getenv('VLLM_NEW')")
    assert known_env(tree, tmp_path) == first | {"VLLM_NEW"}


@pytest.mark.parametrize("source", ["", "other = {}", None])
def test_a_tree_without_a_registry_is_refused(
    tree: Tree, tmp_path: Path, source: str | None
) -> None:
    envs = tree.root / "vllm" / "envs.py"
    envs.unlink() if source is None else envs.write_text(source)
    with pytest.raises(ConfigError, match="environment_variables"):
        known_env(tree, tmp_path)


def test_known_names_and_other_names_pass() -> None:
    environ = {
        "VLLM_PORT": "8000",
        "VLLM_DP_MASTER_PORT": "1",
        "VLLM_MY_FLAG": "1",
        "HOME": "/",
        "MY_VLLM_X": "1",
        "vllm_x": "1",
        **dict.fromkeys(OWN_NAMES, "/x"),
    }
    assert messages(environ, "VLLM_MY_FLAG") == []


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("VLLM_USE_V2_MODEL_RUNER", "VLLM_USE_V2_MODEL_RUNNER"),
        ("VLLM_MY_FLAGG", "VLLM_MY_FLAG"),
        ("VLLM_OVERLAY_RECIPE", "VLLM_OVERLAY_RECIPES"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest(name: str, near: str) -> None:
    (error,) = messages({name: "s3cret"}, "VLLM_MY_FLAG")
    assert error.startswith(f"environment: environment variable {name} is known to neither")
    assert error.endswith(f"did you mean '{near}'?")
    assert "s3cret" not in error


def test_an_unlike_name_is_refused() -> None:
    assert messages({"VLLM_": "", "VLLM_ZZZZZZZZZZZZ": ""})[0].endswith("unset it")
    assert len(messages({"VLLM_": "", "VLLM_ZZZZZZZZZZZZ": ""})) == 2


def test_a_recipe_is_told_where(tmp_path: Path) -> None:
    def place(name: str) -> SimpleNamespace:
        return SimpleNamespace(file="r.yaml", line=7, column=len(name))

    (error,) = check_env({"VLLM_PROT": "1", "VLLM_PORT": "1"}, KNOWN, (), place)
    assert str(error).startswith("r.yaml:7:9: environment variable VLLM_PROT ")
    assert "did you mean 'VLLM_PORT'?" in str(error)
    (error,) = check_env({"VLLM_SERVICE_HOST": "10.0.0.1"}, KNOWN, (), place)
    assert str(error).startswith("r.yaml:7:17: environment variable VLLM_SERVICE_HOST is known")


def test_a_kubernetes_service_called_vllm_is_named_as_the_cause() -> None:
    service = {
        "VLLM_SERVICE_HOST": "10.0.0.1",
        "VLLM_SERVICE_PORT": "80",
        "VLLM_SERVICE_PORT_HTTP": "80",
        "VLLM_PORT": "tcp://10.0.0.1:80",
        "VLLM_PORT_80_TCP": "tcp://10.0.0.1:80",
        "VLLM_PORT_80_TCP_PROTO": "tcp",
        "VLLM_PORT_80_TCP_PORT": "80",
        "VLLM_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    (error,) = messages(service)
    assert "variables VLLM_PORT and 7 more come from a Kubernetes Service" in error
    assert "'vllm'" in error
    assert "enableServiceLinks: false" in error


def test_services_are_told_apart_and_from_misspelt_names() -> None:
    errors = messages(
        {
            "VLLM_ROUTER_SERVICE_HOST": "10.0.0.1",
            "VLLM_ROUTER_PORT_80_TCP": "tcp://10.0.0.1:80",
            "VLLM_DP_MASTER_SERVICE_HOST": "10.0.0.1",
            "VLLM_DP_MASTER_PORT": "tcp://10.0.0.1:80",
            "VLLM_PROT": "1",
            "VLLM_SOME_PORT": "80",
        }
    )
    assert len(errors) == 4
    assert "'VLLM_PORT'" in errors[0]
    assert "VLLM_SOME_PORT" in errors[1]
    assert "'vllm-dp-master'" in errors[2]
    assert "'vllm-router'" in errors[3]


def test_vllm_port_with_an_address_is_never_a_port() -> None:
    (error,) = messages({"VLLM_PORT": "tcp://10.0.0.1:80"})
    assert "named 'vllm'" in error


def test_a_port_beside_a_service_is_still_a_port() -> None:
    (error,) = messages({"VLLM_SERVICE_HOST": "10.0.0.1", "VLLM_PORT": "8000"})
    assert "variable VLLM_SERVICE_HOST comes from" in error
