"""`doctor`, and the same look before a launch: what would fail later, minutes into a load.

No check imports vLLM or torch, and none takes noticeable time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_overlay.doctor import gpu, memory, model, network, system
from vllm_overlay.doctor.check import FAIL, OK, WARN, Check, Look, failed
from vllm_overlay.errors import ConfigError, ConfigErrors
from vllm_overlay.host import Gpu, gpus, visible
from vllm_overlay.resolve import Resolution

if TYPE_CHECKING:
    from rich.console import RenderableType

CHECKS: tuple[Callable[[Look], list[Check]], ...] = (
    gpu.driver,
    gpu.requires,
    gpu.ranks,
    gpu.free,
    memory.shm,
    memory.memory,
    memory.states,
    model.model,
    system.caches,
    network.ports,
    network.address,
    network.interfaces,
    network.rdma,
    system.core,
    system.clock,
    system.secrets,
)
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def examine(resolution: Resolution | None, home: Path, environ: Mapping[str, str]) -> list[Check]:
    """Return what every check finds. Without a recipe, what depends on one is left out."""
    plan = resolution.plan if resolution is not None else None
    checks: list[Check] = []
    found: Sequence[Gpu] = ()
    to_do = CHECKS
    try:
        found = gpus()
    except ConfigError as error:
        checks, to_do = failed("driver", [error]), CHECKS[1:]
    env = {**environ, **(plan.env if plan else {})}
    look = Look(
        plan=plan,
        applied=resolution.applied if resolution is not None else (),
        home=home,
        env=env,
        gpus=tuple(visible(found, env)),
    )
    for check in to_do:
        try:
            checks += check(look)
        except OSError as error:  # a system of its own kind is no reason not to serve
            detail = f"this cannot be looked at: {error}"
            checks.append(Check(check.__name__, WARN, detail, "look yourself"))
    return checks


def examine_recipe(
    ask: Callable[[], Resolution] | None, home: Path, environ: Mapping[str, str]
) -> list[Check]:
    """Return first whether the recipe that ``ask`` resolves can be served, then what else is found.

    None stands for no recipe: then only the machine is looked at.
    """
    resolution = None
    checks: list[Check] = []
    if ask is not None:
        try:
            resolution = ask()
            notes = "\n".join((resolution.plan.recipe["name"], *resolution.plan.notes))
            checks = failed("recipe", resolution.errors) or [Check("recipe", OK, notes)]
        except ConfigErrors as several:
            checks = failed("recipe", several.errors)
        except ConfigError as error:
            checks = failed("recipe", [error])
    return checks + examine(resolution, home, environ)


def as_json(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the findings as `doctor --json` prints them."""
    names = ("name", "state", "detail", "remedy")
    return {"checks": [{name: getattr(check, name) for name in names} for check in checks]}


def sound(checks: Sequence[Check]) -> bool:
    """Return whether nothing fails."""
    return all(check.state != FAIL for check in checks)


def checks_table(checks: Sequence[Check]) -> RenderableType:
    """Return the findings as a table for a terminal."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "state", "found", "what to do", box=SIMPLE, pad_edge=False)
    for check in checks:
        state = Text(check.state, style=COLOURS[check.state])
        table.add_row(check.name, state, Text(check.detail), Text(check.remedy))
    return table
