"""The two sides of a measurement: one recipe, resolved with a fix on and with it off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vllm_overlay.errors import ConfigError, UsageError, did_you_mean, raise_all
from vllm_overlay.fix import Fix, load_fixes
from vllm_overlay.plan import Plan
from vllm_overlay.resolve import Request, resolve
from vllm_overlay.selection import OFF

ON_OFF = ("on", "off")


@dataclass(frozen=True)
class Side:
    """One side. ``environ`` is what its server is started with: ``flag`` has its value in it."""

    name: str  # on | off
    fix: str
    flag: str
    value: str
    plan: Plan
    environ: Mapping[str, str]


def both_sides(request: Request, name: str, tokens: int) -> tuple[Side, Side]:
    """Resolve the recipe with the fix ``name`` on, and off, for requests of ``tokens`` in all.

    Raises ConfigError(s) for whatever forbids to launch either, where the two would be alike, and
    for requests that are longer than the recipe's context.
    """
    fix = _fix(request, name)
    if fix.flag is None:
        raise ConfigError(
            f"the fix {name} cannot be toggled", file=fix.file, found="no flag",
            remedy="give it a flag, which turns it off",
        )  # fmt: skip
    asked = request.environ.get(fix.flag.name, OFF)
    on = _side(request, fix, "on", fix.flag.default if asked == OFF else asked)
    off = _side(request, fix, "off", OFF)
    verdict = next(planned for planned in on.plan.fixes if planned.name == name)
    if verdict.verdict != "apply":
        raise ConfigError(
            f"on and off are the same: the fix {name} is {verdict.verdict}",
            found="; ".join(verdict.reasons), expected="a fix that applies",
            remedy="measure it on a vLLM that needs it",
        )  # fmt: skip
    if on.plan.nodes:
        raise UsageError(
            "a recipe of several nodes cannot be measured by starting and stopping one",
            remedy="serve it, and run vllm bench serve against its head",
        )
    context = on.plan.serve.get("max-model-len")
    if isinstance(context, int) and 0 < context < tokens:
        raise UsageError(
            "the requests do not fit into the recipe's context",
            found=f"{tokens} tokens with --input-len and --output-len", expected=context,
        )  # fmt: skip
    return on, off


def _fix(request: Request, name: str) -> Fix:
    known = load_fixes(request.folders.fixes)
    if name not in known:
        raise UsageError(
            "there is no such fix", found=repr(name),
            expected=f"the name of a folder in {request.folders.fixes}",
            remedy=did_you_mean(name, known),
        )  # fmt: skip
    return known[name]


def _side(request: Request, fix: Fix, name: str, value: str) -> Side:
    assert fix.flag is not None
    environ = {**request.environ, fix.flag.name: value}
    resolution = resolve(replace(request, environ=environ))
    raise_all(resolution.errors)
    return Side(name, fix.name, fix.flag.name, value, resolution.plan, environ)
