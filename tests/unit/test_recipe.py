"""Recipes: what a file, its parents and its variant become."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.recipes import HEAD, load, refusals, write
from vllm_overlay.errors import ConfigError, ConfigErrors
from vllm_overlay.recipe import Expect, Requires, recipe_names


def test_loads_the_recipe_of_the_design(tmp_path: Path) -> None:
    write(
        tmp_path,
        "base/h200",
        'schema: 1\nname: base/h200\nserve: {max-num-seqs: 8}\nenv: {A: "1"}\n',
    )
    write(
        tmp_path,
        "glm53-flash",
        """\
schema: 1
name: glm53-flash
summary: GLM-5.3-Flash NVFP4, one KDA state per request
extends: base/h200              # one parent
vllm: "0.33.0"
model: /models/glm-5.3-flash-nvfp4
serve:
  served-model-name: glm53
  tensor-parallel-size: 4
  speculative-config: {method: mtp, num_speculative_tokens: 7}
env: {VLLM_USE_V2_MODEL_RUNNER: "1"}
fixes: [glm5next-recoverssm]
variants: {tp2: {serve: {tensor-parallel-size: 2, max-num-seqs: 16}}}
requires: {gpus: 4, compute-capability: ">=9.0", gpu-memory: 120GiB, shm: 16GiB}
smoke: {expect: [{prompt: "The capital of France is", contains: Paris}]}
""",
    )
    recipe = load(tmp_path, "glm53-flash")
    assert recipe.name == "glm53-flash"
    assert recipe.summary == "GLM-5.3-Flash NVFP4, one KDA state per request"
    assert (recipe.vllm, recipe.model) == ("0.33.0", "/models/glm-5.3-flash-nvfp4")
    assert recipe.serve == {
        "max-num-seqs": 8,
        "served-model-name": "glm53",
        "tensor-parallel-size": 4,
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 7},
    }
    assert recipe.env == {"A": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert recipe.fixes == ("glm5next-recoverssm",)
    assert recipe.requires == Requires(4, ">=9.0", "120GiB", "16GiB")
    assert recipe.smoke.expect == (Expect("The capital of France is", "Paris"),)
    assert (recipe.variant, recipe.variants) == (None, ("tp2",))
    tp2 = load(tmp_path, "glm53-flash", "tp2")
    assert tp2.serve == {**recipe.serve, "tensor-parallel-size": 2, "max-num-seqs": 16}
    assert (tp2.variant, tp2.env, tp2.fixes) == ("tp2", recipe.env, recipe.fixes)


def test_places_point_into_the_file_that_set_a_value(tmp_path: Path) -> None:
    write(tmp_path, "base", "schema: 1\nname: base\nserve:\n  a: 1\n  b: 2\n")
    write(tmp_path, "r", HEAD + "extends: base\nserve:\n  b: 3\nfixes: [x, y]\n")
    places = load(tmp_path).places
    assert (places.at("serve", "a").file.name, places.at("serve", "a").line) == ("base.yaml", 4)
    assert (places.at("serve", "b").file.name, places.at("serve", "b").line) == ("r.yaml", 7)
    assert (places.at("fixes", 1).line, places.at("fixes", 1).column) == (8, 12)


def test_merges_maps_by_key_and_replaces_lists(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a",
        "schema: 1\nname: a\nsummary: of a\n"
        "serve: {m: {x: 1, y: {z: 1}}, l: [1], k: [1]}\nfixes: [f]\n",
    )
    write(
        tmp_path,
        "b",
        "schema: 1\nname: b\nextends: a\nserve: {m: {y: {w: 2}}, l: [2], k: +[2]}\nfixes: +[g]\n",
    )
    write(tmp_path, "r", HEAD + "extends: b\nserve: {k: +[3], new: +[4]}\nfixes: +[h, f]\n")
    recipe = load(tmp_path)
    assert recipe.serve == {
        "m": {"x": 1, "y": {"z": 1, "w": 2}},
        "l": [2],
        "k": [1, 2, 3],
        "new": [4],
    }
    assert recipe.fixes == ("f", "g", "h")
    assert recipe.summary == ""


def test_null_removes_what_a_parent_set_and_is_a_value_inside_a_flag(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a",
        "schema: 1\nname: a\nserve: {x: 1, y: {z: 1}}\nenv: {A: b}\nrequires: {gpus: 2}\n",
    )
    write(
        tmp_path,
        "r",
        HEAD + "extends: a\nserve: {x: null, y: {z: null}}\nenv: {A: ~}\nrequires: {gpus: }\n",
    )
    recipe = load(tmp_path)
    assert recipe.serve == {"y": {"z": None}}
    assert recipe.env == {}
    assert recipe.requires == Requires()
    write(tmp_path, "r", HEAD + "serve: {x: null}\nvariants: {v: {env: {B: null}}}\n")
    assert refusals(tmp_path) == [
        "r.yaml:5:9: null removes nothing: no parent sets 'x'; remove the line or give a value",
        "r.yaml:6:22: null removes nothing: no parent sets 'B'; remove the line or give a value",
    ]


def test_variants_are_inherited_and_merged(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a",
        "schema: 1\nname: a\nserve: {x: 1}\nfixes: [f]\n"
        "variants: {v: {serve: {x: 2, y: 2}, fixes: +[g]}, w: {model: other}}\n",
    )
    write(
        tmp_path,
        "r",
        HEAD + "extends: a\nvariants: {v: {serve: {y: null, z: 3}, fixes: +[h]}}\nserve: {y: 1}\n",
    )
    assert load(tmp_path).variants == ("v", "w")
    variant = load(tmp_path, variant="v")
    assert variant.serve == {"x": 2, "z": 3}
    assert variant.fixes == ("f", "g", "h")
    assert load(tmp_path, variant="w").model == "other"
    assert load(tmp_path).serve == {"x": 1, "y": 1}
    assert refusals(tmp_path, variant="vv") == [
        "r.yaml:6:1: the recipe has no variant 'vv'; did you mean 'v'?"
    ]


def test_a_recipe_without_variants_says_so(tmp_path: Path) -> None:
    write(tmp_path, "r", HEAD)
    assert refusals(tmp_path, variant="v") == [
        "r.yaml:1:1: the recipe has no variant 'v'; the recipe has no variants"
    ]


def test_shows_the_mistakes_of_a_parent_too(tmp_path: Path) -> None:
    write(tmp_path, "base", "schema: 1\nname: base\nserve: 3\n")
    write(tmp_path, "r", HEAD + "extends: base\nserve: {x: 1}\nfixs: []\n")
    assert [line.split(":")[0] for line in refusals(tmp_path)] == ["base.yaml", "r.yaml"]


def test_checks_variants_that_are_not_chosen(tmp_path: Path) -> None:
    write(tmp_path, "a", "schema: 1\nname: a\nserve: {x: {y: 1}}\n")
    write(
        tmp_path,
        "r",
        HEAD + "extends: a\nvariants: {v: {requires: {gpus: x}}, w: {env: {A: null}}}\n",
    )
    assert len(refusals(tmp_path)) >= 1
    write(tmp_path, "r", HEAD + "variants: {" + ", ".join(f"v{i}: {{}}" for i in range(65)) + "}\n")
    assert "expected at most 64" in refusals(tmp_path)[0]


def test_a_recipe_that_extends_itself(tmp_path: Path) -> None:
    write(tmp_path, "r", HEAD + "extends: r\n")
    assert refusals(tmp_path) == [
        "r.yaml:5:10: the recipe extends itself: r -> r; break the circle"
    ]
    write(tmp_path, "r", HEAD + "extends: a\n")
    write(tmp_path, "a", "schema: 1\nname: a\nextends: b\n")
    write(tmp_path, "b", "schema: 1\nname: b\nextends: a\n")
    assert refusals(tmp_path) == [
        "b.yaml:3:10: the recipe extends itself: r -> a -> b -> a; break the circle"
    ]
    (tmp_path / "link.yaml").symlink_to(tmp_path / "r.yaml")
    write(tmp_path, "r", HEAD + "extends: link\n")
    assert "the recipe extends itself" in refusals(tmp_path)[0]


def test_a_chain_of_parents_has_an_end(tmp_path: Path) -> None:
    write(tmp_path, "r", HEAD + "extends: p1\n")
    for i in range(1, 40):
        write(tmp_path, f"p{i}", f"schema: 1\nname: p{i}\nextends: p{i + 1}\n")
    assert refusals(tmp_path) == [
        "p15.yaml:3:10: the recipe has too many parents; expected up to 16"
    ]


@pytest.mark.parametrize(
    ("parent", "expected"),
    [
        ("../x", "the parent leads out of the recipe folder; found the text '../x'"),
        ("/etc/x", "the parent leads out of the recipe folder; found the text '/etc/x'"),
        ("a/../../x", "the parent leads out of the recipe folder; found the text 'a/../../x'"),
        ("out/x", "the parent 'out/x' is a link out of the recipe folder; expected a recipe in"),
        ("linked", "the parent 'linked' is a link out of the recipe folder; expected a recipe in"),
    ],
)
def test_a_parent_outside_of_the_folder(tmp_path: Path, parent: str, expected: str) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (tmp_path / "x.yaml").write_text("schema: 1\nname: x\n")
    (folder / "out").symlink_to(tmp_path)
    (folder / "linked.yaml").symlink_to(tmp_path / "x.yaml")
    (folder / "r.yaml").write_text(HEAD + f"extends: {parent}\n")
    lines = refusals(folder)
    assert len(lines) == 1
    assert lines[0].startswith(f"r.yaml:5:10: {expected}")


def test_an_unknown_parent(tmp_path: Path) -> None:
    write(tmp_path, "base/h200", "schema: 1\nname: h200\n")
    write(tmp_path, "r", HEAD + "extends: base/h20\n")
    assert refusals(tmp_path)[0].endswith("did you mean 'base/h200'?")
    write(tmp_path, "r", HEAD + "extends: base/h200.yaml\n")
    assert refusals(tmp_path)[0].endswith("did you mean 'base/h200'?")
    write(tmp_path, "r", HEAD + "extends: [base/h200]\n")
    assert refusals(tmp_path) == [
        "r.yaml:5:10: wrong type of 'extends'; found a list; expected text"
    ]


def test_finds_a_recipe_by_name_or_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = write(tmp_path, "base/r", HEAD)
    assert recipe_names(tmp_path) == ["base/r"]
    assert load(tmp_path, "base/r").file == inner
    assert load(tmp_path / "nowhere", str(inner)).file == inner
    monkeypatch.chdir(inner.parent)
    assert load(tmp_path / "nowhere", "r.yaml").file == Path("r.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r").mkdir()  # a folder of that name is no recipe
    write(tmp_path, "r", HEAD + "summary: the file\n")
    assert load(tmp_path, "r").summary == "the file"


def test_an_unknown_recipe(tmp_path: Path) -> None:
    write(tmp_path, "demo", HEAD)
    for name in ("demi", "demo.yml", "./demi.yaml"):
        assert refusals(tmp_path, name)[0].endswith("did you mean 'demo'?")
    for name in ("../demo", "", "/", "x" * 5000, "a\0b"):
        assert refusals(tmp_path, name)[0].startswith("there is no recipe '")
    assert refusals(tmp_path / "absent", "demo")[0].endswith("the folder has no recipes")


def test_a_named_recipe_stays_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (tmp_path / "x.yaml").write_text(HEAD)
    (folder / "r.yaml").symlink_to(tmp_path / "x.yaml")
    assert "leads out of" in refusals(folder)[0]
    (folder / "in.yaml").write_text(HEAD)
    (folder / "r.yaml").unlink()
    (folder / "r.yaml").symlink_to(folder / "in.yaml")
    assert load(folder).model == "m"


LINES = st.lists(
    st.sampled_from([
        *HEAD.splitlines(), "extends: r", "extends: other", "fixes: [a, b]", "fixes: +[a]",
        "fixes: a", "serve: {a: null, b: [1], c: {d: null}}", "serve:", "env: {A: '1', B: null}",
        "env: {A: 1}", "variants: {v: {serve: {a: null}, fixes: +[c]}, w: }", "variants: [v]",
        "requires: {gpus: 1, shm: 1GiB}", "requires: {gpus: null}", "smoke: {expect: +[]}",
        "smoke: {expect: [{prompt: a, contains: b}]}", "model: [m]", "? [a]", "- x", "name: {a: b}",
    ]),
    max_size=12,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        LINES.map(lambda lines: "\n".join(lines).encode()),
        LINES.map(lambda lines: (HEAD + "\n".join(lines)).encode()),
    ),
    st.sampled_from([None, "v"]),
)
@example(HEAD.encode(), None)
@example(HEAD.encode() + b"env: {}", "v")
def test_any_bytes_end_in_a_recipe_or_a_refusal(
    tmp_path: Path, data: bytes, variant: str | None
) -> None:
    (tmp_path / "r.yaml").write_bytes(data)
    (tmp_path / "other.yaml").write_text("schema: 1\nname: other\nserve: {a: 1}\nenv: {B: x}\n")
    try:
        recipe = load(tmp_path, variant=variant)
    except (ConfigError, ConfigErrors) as error:
        assert str(error)
    else:
        assert recipe.vllm
        assert recipe.model
        json.dumps([recipe.serve, recipe.env])
