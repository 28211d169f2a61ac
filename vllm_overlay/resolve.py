"""Recipe + fixes + installed vLLM -> plan, or every reason why not. Knows nothing of processes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vllm_overlay import environ as env_checks
from vllm_overlay import flags
from vllm_overlay.activate.planfile import sha256
from vllm_overlay.activate.statement import PER_NODE
from vllm_overlay.buildid import build_id
from vllm_overlay.errors import ConfigError, ConfigErrors, raise_all
from vllm_overlay.extraflags import parse_extra
from vllm_overlay.fix import Fix, check_needs, load_fixes
from vllm_overlay.flags import COMMAND_LINE, Override
from vllm_overlay.folders import Folders
from vllm_overlay.hidden import secrets_in
from vllm_overlay.host import gpu_architecture
from vllm_overlay.model import find_model
from vllm_overlay.nodes import check_sizes, uses_ray
from vllm_overlay.parsertable import parser_table
from vllm_overlay.patched import Modules, plan_modules
from vllm_overlay.plan import Plan, PlannedFix
from vllm_overlay.recipe import Recipe, load_recipe
from vllm_overlay.recipe_format import CACHE_VARIABLES, NODE_FLAGS, NODE_REMEDY
from vllm_overlay.selection import Chosen, check_flags, choose
from vllm_overlay.subject import subject_of
from vllm_overlay.upstream import Tree, installed_tree
from vllm_overlay.verdict import Judged, judge

Result = TypeVar("Result")
# Fixes of these modules never run in the API server: vLLM's Rust front end may stand in for it.
ENGINE_ONLY = ("vllm.model_executor.", "vllm.models.", "vllm.v1.worker.", "vllm.v1.attention.")


@dataclass(frozen=True)
class Request:
    """What is asked for: a recipe, perhaps a variant, and the serve flags given after it."""

    recipe: str
    variant: str | None
    extra: tuple[str, ...]
    environ: Mapping[str, str]
    folders: Folders


@dataclass(frozen=True)
class Resolution:
    """A plan, why it must not be launched (``errors``), and what to write and run if it may.

    ``argv`` is the command line after ``vllm serve``, ``applied`` the fixes that are on.
    """

    plan: Plan
    errors: tuple[ConfigError, ...]
    modules: Modules
    argv: tuple[str, ...]
    applied: tuple[Fix, ...]


def resolve(request: Request) -> Resolution:
    """Resolve a recipe against the installed vLLM.

    Raises ConfigError(s) where there is nothing to show: a recipe or fix that cannot be read, or
    no vLLM. Everything else that forbids a launch is in ``Resolution.errors``, all at once.
    """
    folders = request.folders
    recipe = load_recipe(request.recipe, folder=folders.recipes, variant=request.variant)
    known = _load_fixes(folders.fixes, recipe)
    tree = installed_tree(folders.home / "info")
    errors: list[ConfigError] = []
    errors += _check_version(recipe, tree)
    nothing: list[Chosen] = []
    chosen = _collect(errors, lambda: choose(recipe, known, request.environ), nothing)
    applied = [choice.fix for choice in chosen if choice.on]
    judged = judge(applied, tree)
    model = _collect(errors, lambda: find_model(recipe, folders.models), recipe.model)
    environment, env_overrides = _environment(recipe, request, tree, known, chosen, errors)
    started = {**request.environ, **environment}
    serve, overrides, argv = _serve(recipe, request, tree, model, started, errors)
    notes = _check_needs(applied, model, serve, started, errors)
    several = recipe.nodes.count > 1 or uses_ray(serve)
    sizes = recipe.places.at("nodes", "count")
    errors += check_sizes(recipe.nodes.count, recipe.nodes.per_node.gpus, serve, sizes)
    errors += [error for item in judged for error in _verdict_errors(item)]
    errors += _check_frontend(judged, started)
    key = cache_key(tree, judged)
    for name, kind in CACHE_VARIABLES.items():
        own = request.environ.get(name)
        environment[name] = f"{own}/{key}" if own else f"{folders.home}/caches/{key}/{kind}"
    modules = plan_modules(judged, tree)
    served = serve.get("served-model-name", model)
    plan = Plan(
        cache_key=key,
        recipe={"name": recipe.name, "file": str(recipe.file), "variant": recipe.variant},
        folders={
            "recipes": str(folders.recipes),
            "fixes": str(folders.fixes),
            "models": str(folders.models),
            "source": folders.source,
        },
        vllm={"version": tree.version, "path": str(tree.root / "vllm"), "torch": torch_version()},
        model=model,
        served_model=str(served[0] if isinstance(served, list) else served),
        serve=serve,
        env=environment,
        fixes=tuple(_planned(choice, judged) for choice in chosen),
        overrides=(*overrides, *env_overrides),
        requires={**_plain(recipe.requires), **_plain(recipe.nodes.per_node)},
        smoke=_plain(recipe.smoke),
        notes=tuple(notes),
        modules=modules.entries,
        nodes={"count": recipe.nodes.count, "build": build_id()} if several else {},
    )
    return Resolution(plan, tuple(errors), modules, (model, *argv), tuple(applied))


def _load_fixes(folder: Path, recipe: Recipe) -> dict[str, Fix]:
    """Load every fix. One that is broken may have any flag, so none can be told from a misspelt."""
    try:
        return load_fixes(folder)
    except (ConfigError, ConfigErrors) as caught:
        errors = list(caught.errors) if isinstance(caught, ConfigErrors) else [caught]
    places = [Path(error.file) for error in errors if error.file is not None]
    within = [place.relative_to(folder) for place in places if place.is_relative_to(folder)]
    broken = sorted({place.parts[0] for place in within if place.parts} - {*recipe.fixes})
    if broken:
        what = (
            f"no recipe can be served while {', '.join(broken)} cannot be read, although "
            f"{recipe.name} does not name it: its flag is not known"
        )
        errors.append(ConfigError(what, file=folder, remedy="repair it, or move it elsewhere"))
    raise ConfigErrors(errors)


def _check_version(recipe: Recipe, tree: Tree) -> list[ConfigError]:
    if recipe.vllm == tree.version:
        return []
    place = recipe.places.at("vllm")
    return [
        ConfigError(
            f"recipe {recipe.name} is for another vLLM",
            file=place.file,
            line=place.line,
            column=place.column,
            found=f"vLLM {tree.version} in {tree.root}",
            expected=f"vLLM {recipe.vllm}",
            remedy="use the image built for that release, or write a recipe for this one",
        )
    ]


def _check_needs(
    fixes: Sequence[Fix],
    model: str,
    serve: Mapping[str, Any],
    started: Mapping[str, str],
    errors: list[ConfigError],
) -> list[str]:
    """Add each need that is not met to the errors; return what only the start can tell."""
    notes: list[str] = []

    def check() -> None:
        subject = subject_of(model, serve, started, fixes)
        for fix in fixes:
            unmet, open_questions = check_needs(fix, subject)
            errors.extend(unmet)
            notes.extend(open_questions)

    _collect(errors, check, None)
    return notes


def _collect(errors: list[ConfigError], ask: Callable[[], Result], otherwise: Result) -> Result:
    """Return what ``ask`` returns; what it refuses is added to the reasons."""
    try:
        return ask()
    except ConfigErrors as several:
        errors.extend(several.errors)
    except ConfigError as error:
        errors.append(error)
    return otherwise


def _serve(
    recipe: Recipe,
    request: Request,
    tree: Tree,
    model: str,
    started: Mapping[str, str],
    errors: list[ConfigError],
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Return the serve flags in force, what the command line replaced, and vLLM's arguments."""
    home = request.folders.home
    table = parser_table(tree, home, started)
    nothing: dict[str, object] = {}
    extra = _collect(errors, lambda: parse_extra(request.extra, table), nothing)
    errors += [
        flags.error_at(COMMAND_LINE, f"flag '{name}' is not taken here", remedy=NODE_REMEDY)
        for name in NODE_FLAGS
        if name in extra
    ]
    overrides: list[Override] = []
    merged = flags.canonical(recipe.serve, table)
    # Before anything is merged or shown: a plan is printed even if it must not be launched.
    secrets = secrets_in(recipe.serve, lambda path: recipe.places.at("serve", *path))
    secrets += secrets_in(extra, lambda _: COMMAND_LINE)
    if secrets:
        raise_all([*errors, *secrets])
    try:
        merged, overrides = flags.merge(recipe.serve, extra, table)
    except ConfigError as error:
        errors.append(error)

    def place(path: tuple[str, ...]) -> Any:
        return COMMAND_LINE if path and path[0] in extra else recipe.places.at("serve", *path)

    found = flags.check_serve(recipe.serve, table, lambda path: recipe.places.at("serve", *path))
    found += flags.check_serve(merged, table, place) if not found else []
    errors += found
    argv = [] if errors else flags.to_argv(merged, table)
    if not errors:
        errors += flags.check_argv(model, argv, tree, home, started, place)
    return merged, [dataclasses.asdict(item) for item in overrides], argv


def _environment(
    recipe: Recipe,
    request: Request,
    tree: Tree,
    known: Mapping[str, Fix],
    chosen: Sequence[Chosen],
    errors: list[ConfigError],
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the variables that the plan sets, and what the environment replaced in them."""
    names = env_checks.known_env(tree, request.folders.home)
    own = {fix.flag.name for fix in known.values() if fix.flag}
    errors += check_flags(chosen, names)
    errors += env_checks.check_env(request.environ, names, own)
    errors += env_checks.check_env(
        recipe.env, names, own, lambda name: recipe.places.at("env", name)
    )
    environment = dict(recipe.env)
    overrides = []
    secrets = secrets_in(recipe.env, lambda path: recipe.places.at("env", *path))
    outside = {name: request.environ[name] for name in recipe.env if name in request.environ}
    remedy = "leave it out of the recipe's env: vLLM gets it from the environment all the same"
    secrets += secrets_in(outside, lambda _: env_checks.EnvironmentPlace(), remedy)
    if secrets:
        raise_all([*errors, *secrets])
    for name, value in recipe.env.items():
        # What may differ between nodes stays out of the plan, which must not.
        now = value if name in PER_NODE else request.environ.get(name, value)
        if now != value:
            environment[name] = now
            overrides.append({"flag": f"env {name}", "recipe": value, "now": now})
    for choice in chosen:
        if choice.fix.flag is not None and choice.value is not None:
            environment[choice.fix.flag.name] = choice.value
    return environment, overrides


def _verdict_errors(judged: Judged) -> list[ConfigError]:
    if judged.verdict in ("apply", "upstreamed"):
        return []
    return [
        ConfigError(f"fix {judged.fix.name} is {judged.verdict}: {reason}", file=judged.fix.file)
        for reason in judged.reasons
    ]


def _check_frontend(judged: Sequence[Judged], environ: Mapping[str, str]) -> list[ConfigError]:
    """vLLM's Rust front end runs no Python: a fix of the API server would be missing."""
    if environ.get("VLLM_USE_RUST_FRONTEND", "0").strip() in ("", "0"):
        return []
    return [
        ConfigError(
            f"fix {item.fix.name} changes the API server, and VLLM_USE_RUST_FRONTEND replaces it",
            found=f"a target {target.module}",
            remedy="unset VLLM_USE_RUST_FRONTEND, or leave the fix out",
        )
        for item in judged
        if item.verdict == "apply"
        for target in item.targets[:1]
        if not all(target.module.startswith(ENGINE_ONLY) for target in item.targets)
    ]


def _planned(choice: Chosen, judged: Sequence[Judged]) -> PlannedFix:
    result = next((item for item in judged if item.fix.name == choice.fix.name), None)
    return PlannedFix(
        name=choice.fix.name,
        verdict=result.verdict if result else "off",
        flag=choice.fix.flag.name if choice.fix.flag else None,
        value=choice.value,
        value_from=choice.value_from,
        reasons=result.reasons if result else (f"its flag is {choice.value}",),
        targets=tuple(dataclasses.asdict(target) for target in result.targets) if result else (),
        digest=fix_digest(choice.fix),
    )


def fix_digest(fix: Fix) -> str:
    """Return the hex SHA-256 over a fix's code: what it applies, under which names."""
    parts = []
    for kind, files in (
        ("module", fix.modules),
        ("edit", fix.edits),
        ("hook", {name: hook.file for name, hook in fix.hooks.items()}),
    ):
        for name, file in sorted(files.items()):
            parts.append(f"{kind} {name} {sha256(file.read_bytes())}")
    parts += [f"{name} {hook.function}" for name, hook in sorted(fix.hooks.items())]
    return sha256("\n".join([fix.name, *parts]).encode())


def cache_key(tree: Tree, judged: Sequence[Judged]) -> str:
    """Return the key of compile caches: vLLM, torch, GPU architecture and the applied fixes."""
    applied = [fix_digest(item.fix) for item in judged if item.verdict == "apply"]
    return sha256(
        "\n".join([tree.version, torch_version(), gpu_architecture(), *applied]).encode()
    )[:16]


def torch_version() -> str:
    """Return the version of the installed torch, or none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _plain(value: Any) -> dict[str, Any]:
    """Return a frozen record of the recipe as JSON-ready data, without what it leaves open."""
    if value is None:
        return {}
    data = dataclasses.asdict(value)
    return {key.replace("_", "-"): item for key, item in data.items() if item is not None}
