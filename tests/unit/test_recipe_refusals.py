"""Recipes: how each mistake in a file is refused, and that editors are told the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.recipes import HEAD, load, refusals, write
from vllm_overlay.recipe_format import looks_secret
from vllm_overlay.schemas import recipe_schema

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'[key]': {}", "5:1: unknown key '[key]'; known: env, extends"),
        ("env: {'[key]': x}", "5:7: this is no environment variable"),
        ("variants: {v: {'{x}': 1}}", "5:16: unknown key '{x}' in 'variants.v'"),
        ("fixes: !x a", "5:8: a tag is not allowed; found !x; remove it"),
        ("requires: {gpus: 1_0}", "5:18: YAML readers disagree on what this is; found '1_0'"),
        ("serves: {}", "5:1: unknown key 'serves'; did you mean 'serve'?"),
        (
            "fixes: glm5next-recoverssm",
            "5:8: wrong type of 'fixes'; found the text 'glm5next-recoverssm'; expected a list; "
            "write [glm5next-recoverssm]",
        ),
        (
            "fixes:",
            "5:7: wrong type of 'fixes'; found nothing; expected a list; write [] for an "
            "empty list",
        ),
        (
            "fixes: '+[a]'",
            "5:8: wrong type of 'fixes'; found the text '+[a]'; expected a list; "
            "write +[...] without quotes and without a space",
        ),
        (
            "fixes: [1]",
            "5:9: wrong type of 'fixes.0'; found the number 1; expected text; quote it: \"1\"",
        ),
        ("fixes: [a, b, a]", "5:15: the fix 'a' is listed twice; remove one of them"),
        (
            "fixes: ['../x']",
            "5:9: this is no name; found the text '../x'; expected letters, digits, '.', '_', '-'",
        ),
        ("serve: [a]", "5:8: wrong type of 'serve'; found a list; expected a map"),
        ("serve: {tensor_parallel_size: 2}", "write tensor-parallel-size"),
        ("serve: {--tp: 2}", "write tp"),
        ("serve: {speculative-config.method: mtp}", "write it as a map under speculative-config"),
        (
            "serve: {model: x}",
            "5:9: the serve flag 'model' has no place in a recipe; set the recipe's key 'model'",
        ),
        (
            "serve: {config: x}",
            "5:9: the serve flag 'config' has no place in a recipe; write its flags here",
        ),
        (
            "serve: {api-key: x}",
            "5:9: the serve flag 'api-key' is a secret; set the environment "
            "variable VLLM_API_KEY where you start the server",
        ),
        ("serve: {hf-token: x}", "environment variable HF_TOKEN"),
        (
            "env: {A: 1}",
            "5:10: wrong type of 'env.A'; found the number 1; expected text; quote it: \"1\"",
        ),
        ("env: {A: 0.50}", 'quote it: "0.50"'),
        ("env: {A: true}", 'found the truth value true; expected text; quote it: "true"'),
        ("env: {A: on}", "5:10: YAML readers disagree on what this is; found 'on'"),
        ("env: {A-B: x}", "5:7: this is no environment variable"),
        (
            "env: {HF_TOKEN: x}",
            "5:7: the variable 'HF_TOKEN' looks like a secret; set HF_TOKEN "
            "in the environment where you start the server",
        ),
        ("env: {VLLM_OVERLAY_PLAN: x}", "5:7: the variable 'VLLM_OVERLAY_PLAN' is set by"),
        ("env: {TRITON_CACHE_DIR: x}", "5:7: the variable 'TRITON_CACHE_DIR' is set by"),
        ("variants: {a b: {}}", "5:12: this is no variant's name"),
        ("variants: {v: }", "5:14: wrong type of 'variants.v'; found nothing; expected a map"),
        ("variants: {v: {extends: r}}", "5:16: unknown key 'extends' in 'variants.v'"),
        ("variants: {v: {fixes: x}}", "5:23: wrong type of 'variants.v.fixes'"),
        (
            "requires: {gpus: '4'}",
            "5:18: wrong type of 'requires.gpus'; found the text '4'; "
            "expected a whole number; write 4 without quotes",
        ),
        (
            "requires: {gpus: -1}",
            "5:18: wrong value of 'requires.gpus'; found the number -1; expected at least 0",
        ),
        ("requires: {gpus: true}", "found the truth value true; expected a whole number"),
        ("requires: {compute_capability: '9'}", "did you mean 'compute-capability'?"),
        ("requires: {compute-capability: 9.0}", 'expected text; quote it: "9.0"'),
        ("requires: {compute-capability: '9.0'}", "5:32: this is no range; found the text '9.0'"),
        (
            "requires: {shm: 16 gigs}",
            "5:17: this is no size; found the text '16 gigs'; expected a size such as 120GiB",
        ),
        (
            "smoke: {expect: [{prompt: x}]}",
            "5:18: the key 'contains' is missing in 'smoke.expect.0'; expected a text",
        ),
        ("smoke: {expect: [{prompt: '', contains: x}]}", "expected a text that is not empty"),
        ("summary: |\n  a\n  b\n", "5:10: this is not one line of text"),
    ],
)
def test_refuses(tmp_path: Path, text: str, expected: str) -> None:
    write(tmp_path, "r", HEAD + text + "\n")
    lines = refusals(tmp_path)
    assert len(lines) == 1
    assert lines[0].startswith("r.yaml:5:")
    assert expected in lines[0]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("schema: 1", "schema: 2", "1:9: wrong value of 'schema'; found the number 2; expected 1"),
        ("schema: 1", "schema: '1'", "1:9: the version of the format is a whole number"),
        ("schema: 1", "schema: true", "1:9: the version of the format is a whole number"),
        ("schema: 1", "schema: 1.0", "1:9: the version of the format is a whole number"),
        ("schema: 1\n", "", "1:1: the key 'schema' is missing"),
        ("name: r", "name: 3", "2:7: wrong type of 'name'; found the number 3; expected text"),
        (
            '"0.33.0"',
            "0.30",
            "3:7: wrong type of 'vllm'; found the number 0.30; expected text; quote it: \"0.30\"",
        ),
        (
            '"0.33.0"',
            '">=0.33"',
            "3:7: this is no release; found the text '>=0.33'; expected a version such as 0.33.0",
        ),
        ('vllm: "0.33.0"\n', "", "1:1: the key 'vllm' is missing; a recipe without it can only be"),
        ("model: m\n", "", "1:1: the key 'model' is missing; a recipe without it can only be"),
        ("model: m", "model: ../m", "4:8: the model's path leaves its folder"),
        ("model: m", "model: /models/../etc", "4:8: the model's path leaves its folder"),
        ("model: m", "model: a/b/c", "4:8: this is no model; found the text 'a/b/c'; expected an"),
        ("model: m", "model: ''", "4:8: this is no model"),
        ("model: m", "model: /", "4:8: this is no model"),
        ("model: m", "model:", "4:7: wrong type of 'model'; found nothing; expected text"),
        (HEAD, "some text", "1:1: wrong type of 'the document'; found the text 'some text'"),
        (HEAD, "[a]", "1:1: wrong type of 'the document'; found a list; expected a map"),
        (HEAD, "", "1:1: the file is empty"),
    ],
)
def test_refuses_in_the_head(tmp_path: Path, old: str, new: str, expected: str) -> None:
    write(tmp_path, "r", HEAD.replace(old, new))
    lines = refusals(tmp_path)
    assert len(lines) == 1
    assert lines[0].startswith(f"r.yaml:{expected}")


@pytest.mark.parametrize("model", ["/models/a b/ü", "org/name", "a.b-c_d", "/models/x/"])
def test_takes_a_path_a_hub_name_and_a_folder(tmp_path: Path, model: str) -> None:
    write(tmp_path, "r", HEAD.replace("model: m", f"model: {model}"))
    assert load(tmp_path).model == model


def test_shows_every_mistake_of_a_file_in_its_order(tmp_path: Path) -> None:
    write(
        tmp_path,
        "r",
        "schema: 1\nname: r\nserves: {}\nvllm: 0.33\nenv: {A: 1, B: on, A: x}\nfixes: x\n",
    )
    places = [":".join(line.split(":")[:3]) for line in refusals(tmp_path)]
    assert places == [
        "r.yaml:3:1",
        "r.yaml:4:7",
        "r.yaml:5:10",
        "r.yaml:5:16",
        "r.yaml:5:20",
        "r.yaml:6:8",
    ]


def test_shows_twenty_mistakes_at_most(tmp_path: Path) -> None:
    write(tmp_path, "r", HEAD + "env: {" + ", ".join(f"A{i}: {i}" for i in range(3000)) + "}\n")
    lines = refusals(tmp_path)
    assert len(lines) == 21
    assert lines[-1] == "r.yaml: there are more errors"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("HF_TOKEN", "VLLM_API_KEY", "MYKEY", "DB_PASSWORD",
                                    "AWS_ACCESS_KEY_ID", "client_secret", "TOKEN")),
        *((name, False) for name in ("VLLM_MAX_TOKENS", "KEYBOARD", "TOKENIZERS_PARALLELISM",
                                     "VLLM_USE_V2_MODEL_RUNNER")),
    ],
)  # fmt: skip
def test_knows_secrets_by_their_names(name: str, secret: bool) -> None:
    assert looks_secret(name) is secret


def schema_accepts(text: str) -> bool:
    # In an editor +[...] is text, and the schema must let it pass.
    validator = jsonschema.Draft202012Validator(recipe_schema())
    document: Any = yaml.safe_load(text)
    return not list(validator.iter_errors(json.loads(json.dumps(document))))


def test_the_schema_agrees_with_the_loader(tmp_path: Path) -> None:
    for file in sorted((ROOT / "recipes").rglob("*.yaml")):
        assert schema_accepts(file.read_text()), file
    good = (
        HEAD
        + "extends: a\nserve: {x: null, y: [1]}\nenv: {A: null}\nfixes: +[a]\n"
        + "requires: {gpus: null}\n"
    )
    assert schema_accepts(good)
    for bad in (
        "serves: {}",
        "fixes: a",
        "env: {A: 1}",
        "env: {A-B: x}",
        "serve: {a_b: 1}",
        "requires: {shm: 16}",
        "requires: {shm: big}",
        "variants: {v: {name: x}}",
        "variants: {a b: {}}",
        "smoke: {expect: [{prompt: x}]}",
    ):
        write(tmp_path, "r", HEAD + bad + "\n")
        assert refusals(tmp_path)
        assert not schema_accepts(HEAD + bad), bad
