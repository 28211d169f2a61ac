"""Loading a recipe: its file, its parents and its variant become one Recipe.

A child is merged over its parent by key, to every depth; a list replaces the parent's list, or is
appended to it if written ``+[...]``. ``null`` for a key of serve, env or requires removes that key
of the parent; inside a flag's own value null is an ordinary value. ``name`` and ``summary`` are
not inherited, variants are. A variant is merged over the recipe in the same way, last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_overlay.border import raise_problems, suggest, validate
from vllm_overlay.errors import ConfigError
from vllm_overlay.files import inside, is_file, read_bytes, unreadable
from vllm_overlay.recipe_format import MAX_LENGTH, RecipeModel, RequiresModel, is_name
from vllm_overlay.yamlio import Node, Place, Places, parse

MAX_PARENTS = 16
REMOVABLE = ("serve", "env", "requires")  # maps in which null removes the parent's key


@dataclass(frozen=True)
class Requires:
    """What the host must have; None where the recipe does not say."""

    gpus: int | None = None
    compute_capability: str | None = None  # a range of versions, such as ">=9.0"
    gpu_memory: str | None = None  # of each GPU, a size such as "120GiB"
    shm: str | None = None  # a size


@dataclass(frozen=True)
class Nodes:
    """The machines that serve the model together; ``per_node`` wins over the recipe's requires."""

    count: int = 1
    per_node: Requires = Requires()


@dataclass(frozen=True)
class Expect:
    """A known answer: what the model is asked, and a text that its answer contains."""

    prompt: str
    contains: str


@dataclass(frozen=True)
class Smoke:
    """What the smoke checks ask."""

    expect: tuple[Expect, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """A recipe with its parents and its variant merged into it."""

    name: str
    summary: str
    vllm: str  # one release
    model: str  # absolute path, org/name, or the name of a folder in the models folder
    serve: dict[str, Any]
    env: dict[str, str]
    fixes: tuple[str, ...]
    requires: Requires | None
    nodes: Nodes
    smoke: Smoke
    file: Path
    variant: str | None
    variants: tuple[str, ...]
    places: Places = field(repr=False)


def load_recipe(name_or_path: str, *, folder: Path, variant: str | None = None) -> Recipe:
    """Load the recipe ``folder/<name>.yaml`` or a file. Raises ConfigError or ConfigErrors."""
    file = find_recipe(name_or_path, folder)
    errors: list[ConfigError] = []
    chain = _read_chain(file, folder, errors)
    raise_problems(errors, file)
    merged = _merge_chain(chain, errors)
    variants = _variant_nodes(merged)
    bare = _without(merged, "variants")
    whole = {name: _merge(bare, node, errors) for name, node in variants.items()}
    for node in (_without_removals(merged), *whole.values()):
        errors += validate(RecipeModel, node)[1]
    raise_problems(errors, file)
    if variant is not None and variant not in whole:
        place = Places(merged).at("variants")
        remedy = suggest(variant, sorted(whole)) or "the recipe has no variants"
        raise place.error(f"the recipe has no variant '{variant}'", remedy=remedy)
    chosen = whole[variant] if variant is not None else bare
    return _recipe(chosen, file, variant, tuple(variants))


def recipe_names(folder: Path) -> list[str]:
    """Return the names of all recipes in a folder, sorted."""
    try:
        files = list(folder.rglob("*.yaml")) if folder.is_dir() else []
    except OSError as error:
        raise unreadable(folder, error) from None
    return sorted(file.relative_to(folder).with_suffix("").as_posix() for file in files)


def find_recipe(name_or_path: str, folder: Path) -> Path:
    """Return the file of a recipe given by its name in ``folder`` or by its path."""
    names = recipe_names(folder)
    if name_or_path in names:
        file = inside(folder, f"{name_or_path}.yaml")
        if file is None:
            raise ConfigError(f"the recipe '{name_or_path}' leads out of {folder}")
        return file
    path = Path(name_or_path)
    if is_file(path):
        return path
    shown = name_or_path[:MAX_LENGTH]
    remedy = suggest(_stem(shown), names)
    raise ConfigError(
        f"there is no recipe '{shown}'",
        expected=f"a file, or a name in {folder}",
        remedy=remedy or (None if names else "the folder has no recipes"),
    )


def _stem(name: str) -> str:
    return name.removesuffix(".yaml").removesuffix(".yml")


def _read_chain(file: Path, folder: Path, errors: list[ConfigError]) -> list[Node]:
    """Return the documents of a recipe and its parents, the recipe first."""
    chain: list[Node] = []
    seen: dict[Path, str] = {}
    current: Path | None = file
    while current is not None:
        seen[current.resolve()] = current.stem
        root = _read(current, errors)
        if root is None:
            break
        chain.append(root)
        try:
            current = _parent(root, folder, seen)
        except ConfigError as error:
            errors.append(error)
            break
    return chain


def _read(file: Path, errors: list[ConfigError]) -> Node | None:
    """Return a file's document and record what is wrong with it by itself."""
    try:
        root, problems = parse(read_bytes(file), file)
    except ConfigError as error:
        root, problems = None, [error]
    errors += problems
    if root is not None:
        errors += validate(RecipeModel, _without_removals(root))[1]
        errors += _repeated_fixes(root)
    return root


def _parent(root: Node, folder: Path, seen: dict[Path, str]) -> Path | None:
    """Return the file that a document extends; ConfigError if it is unusable."""
    node = root.child("extends")
    if node is None or node.bad or not isinstance(node.value, str):
        return None
    name = node.value
    if not is_name(name):
        return None  # the format's own check has reported it
    file = inside(folder, f"{name}.yaml")
    if file is None:
        what = f"the parent '{name}' is a link out of the recipe folder"
        raise node.place.error(what, expected=f"a recipe in {folder}")
    if not is_file(file):
        known = recipe_names(folder)
        remedy = suggest(_stem(name), known)
        raise node.place.error(f"there is no recipe '{name}' in {folder}", remedy=remedy)
    if file.resolve() in seen:
        cycle = " -> ".join([*seen.values(), seen[file.resolve()]])
        raise node.place.error(f"the recipe extends itself: {cycle}", remedy="break the circle")
    if len(seen) >= MAX_PARENTS:
        raise node.place.error("the recipe has too many parents", expected=f"up to {MAX_PARENTS}")
    return file


def _repeated_fixes(root: Node) -> list[ConfigError]:
    """Refuse a fix that one list names twice."""
    errors = []
    for owner in (root, *_variant_nodes(root).values()):
        fixes = owner.child("fixes")
        items = fixes.value if fixes and isinstance(fixes.value, tuple) else ()
        seen = set()
        for item in items:
            if isinstance(item.value, str) and item.value in seen:
                what = f"the fix '{item.value[:MAX_LENGTH]}' is listed twice"
                errors.append(item.place.error(what, remedy="remove one of them"))
            seen.add(item.value if isinstance(item.value, str) else None)
    return errors


def _variant_nodes(root: Node) -> dict[str, Node]:
    node = root.child("variants")
    return node.value if node and isinstance(node.value, dict) else {}


def _without(root: Node, *keys: str) -> Node:
    """Return a map without some of its keys."""
    if not isinstance(root.value, dict):
        return root
    return replace(root, value={k: v for k, v in root.value.items() if k not in keys})


def _without_removals(root: Node) -> Node:
    """Return a document without the nulls that remove a parent's key, its variants alike."""
    if not isinstance(root.value, dict):
        return root
    values = dict(root.value)
    for section in REMOVABLE:
        node = values.get(section)
        if node is not None and isinstance(node.value, dict):
            kept = {k: v for k, v in node.value.items() if v.value is not None}
            values[section] = replace(node, value=kept)
    variants = values.get("variants")
    if variants is not None and isinstance(variants.value, dict):
        bare = {name: _without_removals(node) for name, node in variants.value.items()}
        values["variants"] = replace(variants, value=bare)
    return replace(root, value=values)


def _merge_chain(chain: Sequence[Node], errors: list[ConfigError]) -> Node:
    """Merge the documents, the recipe's first, over each other from the last parent on."""
    merged = Node(chain[-1].place, {})
    for root in reversed(chain):
        inherited = _without(merged, "schema", "name", "summary", "extends")
        merged = _merge(inherited, root, errors)
    return merged


def _merge(parent: Node, child: Node, errors: list[ConfigError]) -> Node:
    """Merge a recipe or a variant over a recipe."""
    values, keys = _entries(parent)
    child_values, child_keys = _entries(child)
    for key, node in child_values.items():
        if key in REMOVABLE and isinstance(node.value, dict):
            values[key] = _merge_removing(values.get(key), node, errors)
        elif key in values:
            values[key] = _overlay(values[key], node)
        else:
            values[key] = node
        keys[key] = child_keys[key]
    return replace(child, value=values, keys=keys)


def _merge_removing(parent: Node | None, child: Node, errors: list[ConfigError]) -> Node:
    """Merge a map in which null removes the parent's key."""
    values, keys = _entries(parent) if parent is not None else ({}, {})
    child_values, child_keys = _entries(child)
    for key, node in child_values.items():
        if node.value is not None:
            values[key] = _overlay(values[key], node) if key in values else node
        elif values.pop(key, None) is None:
            what = f"null removes nothing: no parent sets '{key[:MAX_LENGTH]}'"
            errors.append(child_keys[key].error(what, remedy="remove the line or give a value"))
        keys[key] = child_keys[key]
    return replace(child, value=values, keys=keys)


def _overlay(parent: Node, child: Node) -> Node:
    """Merge a value over the parent's: maps by key, ``+[...]`` at the end of a list."""
    if isinstance(parent.value, dict) and isinstance(child.value, dict):
        values, keys = _entries(parent)
        for key, node in child.value.items():
            values[key] = _overlay(values[key], node) if key in values else node
            keys[key] = child.keys[key]
        return replace(child, value=values, keys=keys)
    if isinstance(parent.value, tuple) and isinstance(child.value, tuple) and child.append:
        # The parent may be a variant's +[...], which is still to be appended to the recipe's list.
        return replace(child, value=parent.value + child.value, append=parent.append)
    return child


def _entries(node: Node) -> tuple[dict[str, Node], dict[str, Place]]:
    values = node.value if isinstance(node.value, dict) else {}
    return dict(values), dict(node.keys)


def _recipe(root: Node, file: Path, variant: str | None, variants: tuple[str, ...]) -> Recipe:
    """Return the Recipe of a merged document, which must name a model and a vLLM."""
    model, errors = validate(RecipeModel, root)
    for name in ("model", "vllm"):
        if root.child(name) is None:
            remedy = "a recipe without it can only be extended by another"
            errors.append(root.place.error(f"the key '{name}' is missing", remedy=remedy))
    raise_problems(errors, file)
    assert model is not None
    requires, nodes = model.requires, model.nodes
    return Recipe(
        name=model.name,
        summary=model.summary,
        vllm=model.vllm,
        model=model.model,
        serve=model.serve,
        env=model.env,
        fixes=tuple(dict.fromkeys(model.fixes)),  # +[...] may name a fix that a parent has too
        requires=_requires(requires) if root.child("requires") else None,
        nodes=Nodes(nodes.count, _requires(nodes.per_node)),
        smoke=Smoke(tuple(Expect(e.prompt, e.contains) for e in model.smoke.expect)),
        file=file,
        variant=variant,
        variants=variants,
        places=Places(root),
    )


def _requires(model: RequiresModel) -> Requires:
    return Requires(
        gpus=model.gpus or None,
        compute_capability=model.compute_capability or None,
        gpu_memory=model.gpu_memory or None,
        shm=model.shm or None,
    )
