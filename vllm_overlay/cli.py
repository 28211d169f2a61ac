"""The command line: one command a function, no logic."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vllm_overlay.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_USAGE,
    ConfigError,
    ConfigErrors,
    one_line,
)
from vllm_overlay.folders import find_folders, home_folder

if TYPE_CHECKING:
    from vllm_overlay.resolve import Request, Resolution

EXIT_PIPE = 141  # what a shell shows for a program that SIGPIPE ended

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve a model with vLLM and exactly the fixes that its recipe names.",
)

cache_app = typer.Typer(no_args_is_help=True, help="The state folder: caches, plans, sources.")
app.add_typer(cache_app, name="cache")
recipe_app = typer.Typer(no_args_is_help=True, help="Recipes from outside.")
app.add_typer(recipe_app, name="recipe")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a file.")]
Variant = Annotated[str | None, typer.Option(help="A variant of the recipe.")]
Extra = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- FLAGS]", help="vLLM's serve flags; they win over the recipe."),
]
FixesFolder = Annotated[Path | None, typer.Option("--fixes", help="The folder of fixes.")]
WhichVllm = Annotated[
    str | None,
    typer.Option(
        "--vllm", metavar="VERSION|WHEEL|DIR", help="Which vLLM; the installed one if absent."
    ),
]
Port = Annotated[int | None, typer.Option(help="Which server, if several run on this machine.")]


@app.command()
def plan(
    recipe: RecipeName,
    extra: Extra = None,
    variant: Variant = None,
    as_json: AsJson = False,
) -> int:
    """Show what would be applied to the installed vLLM, and why."""
    from vllm_overlay.show import plan_table

    resolution = _resolve(recipe, variant, extra)
    if as_json:
        errors = [str(error) for error in resolution.errors]
        print_json({**resolution.plan.body(), "errors": errors})
    else:
        Console().print(plan_table(resolution.plan))
    report(resolution.errors)
    return EXIT_CONFIG if resolution.errors else 0


@app.command()
def serve(
    recipe: RecipeName,
    extra: Extra = None,
    variant: Variant = None,
    as_json: AsJson = False,
) -> int:
    """Resolve a recipe, write its plan, show it, and become `vllm serve`."""
    from vllm_overlay.launch import become, place, prepare
    from vllm_overlay.show import plan_table
    from vllm_overlay.tell import tell_head

    resolution = None
    try:
        resolution = _resolve(recipe, variant, extra)
        seat = place(resolution, os.environ)
        launch = prepare(resolution, find_folders(os.environ).home, os.environ, seat)
    except (ConfigError, ConfigErrors) as refusal:
        errors = refusal.errors if isinstance(refusal, ConfigErrors) else (refusal,)
        status = _refused(errors, refusal.exit_code)
        tell_head(errors, resolution, os.environ)
        return status
    if as_json:
        print_json(resolution.plan.body())
    else:
        Console(stderr=True).print(plan_table(resolution.plan, seat))
    for line in launch.warnings:
        print(f"vllm-overlay: warning: {line}", file=sys.stderr)
    become(launch)


@app.command()
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="A recipe to check the machine for.")
    ] = None,
    extra: Extra = None,
    variant: Variant = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine, for a recipe if one is named; `serve` does the same before it starts."""
    from vllm_overlay import doctor as checks
    from vllm_overlay.launch import here

    found = checks.examine_recipe(
        (lambda: here(_resolve(str(recipe), variant, extra), os.environ)) if recipe else None,
        home_folder(os.environ),
        os.environ,
    )
    if as_json:
        print_json(checks.as_json(found))
    else:
        Console().print(checks.checks_table(found))
    return 0 if checks.sound(found) else EXIT_FAILED


@app.command()
def status(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Every node's processes; ask it on the head.")
    ] = False,
    port: Port = None,
    as_json: AsJson = False,
) -> None:
    """Show the vLLM processes of this machine and the fixes that each has applied."""
    from vllm_overlay.cluster import cluster_rows, cluster_table
    from vllm_overlay.runs import find_run
    from vllm_overlay.status import status_rows, status_table

    home = home_folder(os.environ)
    rows = cluster_rows(find_run(home, port)) if cluster else status_rows(home)
    if as_json:
        print_json(rows)
    else:
        Console().print(cluster_table(rows) if cluster else status_table(rows))


@app.command()
def health(port: Port = None, as_json: AsJson = False) -> int:
    """Tell whether this machine's server really serves, with every fix in every process."""
    from vllm_overlay.health import check
    from vllm_overlay.runs import find_run

    result = check(find_run(home_folder(os.environ), port))
    if as_json:
        print_json(result.as_dict())
    else:
        print("healthy" if result.ok else "\n".join(result.reasons))
    return 0 if result.ok else EXIT_FAILED


@app.command("check")
def check_command(
    vllm: WhichVllm = None,
    fixes: FixesFolder = None,
    as_json: AsJson = False,
) -> int:
    """Judge every fix against a vLLM, which need not be installed."""
    from vllm_overlay.checks import check_fixes
    from vllm_overlay.show import check_table

    result = check_fixes(vllm, _fixes_folder(fixes), home_folder(os.environ))
    if as_json:
        print_json(result.as_dict())
    else:
        Console().print(check_table(result))
    return 0 if result.ok else EXIT_FAILED


@app.command("new-fix")
def new_fix_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new fix's name.")],
    from_diff: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A public diff, mail or series; a skeleton if absent."),
    ] = None,
    vllm: WhichVllm = None,
    fixes: FixesFolder = None,
    as_json: AsJson = False,
) -> None:
    """Make a fix of a public diff, or a skeleton to write a hook in."""
    from vllm_overlay.newfix import new_fix, print_made

    made = new_fix(name, _fixes_folder(fixes), from_diff, vllm, home_folder(os.environ))
    if as_json:
        print_json(made.as_dict())
    else:
        print_made(made)


@app.command()
def review(
    fix: Annotated[str, typer.Argument(metavar="FIX", help="The fix's name.")],
    vllm: WhichVllm = None,
    fixes: FixesFolder = None,
    yes: Annotated[bool, typer.Option("--yes", help="Record without asking.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show what changed upstream under a fix, and record that it was looked at."""
    from vllm_overlay.review import review_fix

    folder, home = _fixes_folder(fixes), home_folder(os.environ)
    return review_fix(fix, folder, vllm, home, yes=yes, as_json=as_json)


@app.command()
def smoke(
    port: Port = None,
    url: Annotated[str | None, typer.Option(help="A server that is not of this machine.")] = None,
    as_json: AsJson = False,
) -> int:
    """Run the checks of a serving model: answers, streaming, limits, cache, receipts, metrics."""
    from vllm_overlay.smoke import smoke_server

    return smoke_server(home_folder(os.environ), port=port, url=url, as_json=as_json)


@app.command()
def bench(
    recipe: RecipeName,
    toggle: Annotated[str, typer.Option(metavar="FIX", help="The fix to turn on and off.")],
    extra: Extra = None,
    variant: Variant = None,
    streams: Annotated[str, typer.Option(help="How many clients at once, in turn.")] = "8,32,64",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 256,
    prompts_per_stream: Annotated[int, typer.Option(min=1, help="Requests of each client.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="How often on and off take turns.")] = 2,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The folder of the result; bench/results of a checkout if absent, else bench in "
            "the state folder.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a recipe with a fix on and off in turn, and measure both under the same load."""
    from vllm_overlay.bench.record import results_folder
    from vllm_overlay.bench.report import keep, table
    from vllm_overlay.bench.sides import both_sides
    from vllm_overlay.bench.toggle import Loads, measure, parse_streams

    numbers = parse_streams(streams)
    loads = Loads(numbers, prompts_per_stream, input_len, output_len, rounds)
    asked = _request(recipe, variant, extra)
    sides = both_sides(asked, toggle, tokens=input_len + output_len)
    folder = results_folder(save, asked.folders.home)
    file, result = keep(measure(asked, sides, loads), folder)
    if as_json:
        print_json(result)
    else:
        Console().print(table(result["medians"], toggle))
        print(file)


@cache_app.command("ls")
def cache_ls(as_json: AsJson = False) -> None:
    """Show what the state folder holds: size, last use, and the plans that use it."""
    from vllm_overlay.caches import as_json as entries_json
    from vllm_overlay.caches import survey, survey_table

    entries = survey(home_folder(os.environ))
    if as_json:
        print_json(entries_json(entries))
    else:
        Console().print(survey_table(entries))


@cache_app.command("prune")
def cache_prune(
    unused_for: Annotated[
        int,
        typer.Option(
            metavar="DAYS", min=0, max=36500, help="Keep plans that were used in these days."
        ),
    ] = 30,
    everything: Annotated[
        bool, typer.Option("--all", help="Keep only what a server uses now.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove plans without a server, and the caches and sources that no other plan uses."""
    from vllm_overlay.caches import prune, prune_json, prune_lines

    days = 0 if everything else unused_for
    removals, elsewhere = prune(home_folder(os.environ), days, dry_run=dry_run)
    if as_json:
        print_json(prune_json(removals, elsewhere, dry_run))
    else:
        print("\n".join(prune_lines(removals, elsewhere, dry_run)))


def _fixes_folder(named: Path | None) -> Path:
    return named if named is not None else find_folders(os.environ).fixes


@recipe_app.command("import")
def recipe_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A models/<org>/<name>.yaml.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new file, instead of printing it.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The recipe's name; else the file's slug.")
    ] = None,
    vllm: Annotated[
        str | None, typer.Option(help="The release that it is for; else the least of the file.")
    ] = None,
    hardware: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Take the overrides of this hardware; more are possible."),
    ] = None,
) -> None:
    """Make a recipe of a file of the vllm-project/recipes collection."""
    from vllm_overlay.importer import convert
    from vllm_overlay.importer_write import render, save

    imported = convert(file, name or (output.stem if output else None), vllm, hardware or ())
    text = render(imported.body, file)
    if output is None:
        print(text, end="")
    else:
        save(text, output)
    report(imported.notes)


def _resolve(recipe: str, variant: str | None, extra: Sequence[str] | None) -> Resolution:
    from vllm_overlay.resolve import resolve

    return resolve(_request(recipe, variant, extra))


def _request(recipe: str, variant: str | None, extra: Sequence[str] | None) -> Request:
    from vllm_overlay.resolve import Request

    return Request(recipe, variant, tuple(extra or ()), os.environ, find_folders(os.environ))


def print_json(data: object) -> None:
    """Print data as JSON on standard output."""
    print(json.dumps(data, indent=1))


def report(errors: Sequence[ConfigError]) -> None:
    """Print each refusal as one line on standard error."""
    for error in errors:
        print(f"vllm-overlay: {error}", file=sys.stderr)


def main() -> None:
    """Run a command and leave with its exit status; a user's mistake never shows a traceback."""
    try:
        status = _run()
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich and typer leave so when a pipe has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = EXIT_PIPE
    sys.exit(status)


def _run() -> int:
    try:
        status = app(standalone_mode=False)
        return status if isinstance(status, int) else 0
    except ConfigErrors as several:
        return _refused(several.errors, several.exit_code)
    except ConfigError as error:
        return _refused([error], error.exit_code)
    except typer.Abort:
        return 130
    except Exception as error:
        return _usage(error)


def _refused(errors: Sequence[ConfigError], status: int) -> int:
    """Show what is refused before there is a result, to a program too if one asked."""
    report(errors)
    _json_errors([str(error) for error in errors])
    return status


def _json_errors(lines: list[str]) -> None:
    own = itertools.takewhile(lambda word: word != "--", sys.argv[1:])
    if "--json" in own:
        print_json({"errors": lines})


def _usage(error: Exception) -> int:
    """Show a command line that typer refuses; raise anything else."""
    show, says = getattr(error, "show", None), getattr(error, "format_message", None)
    if show is None or says is None:  # a class of typer's own, or of click's: not to be named
        raise error
    show()
    _json_errors([one_line(says())])
    return int(getattr(error, "exit_code", EXIT_USAGE))
