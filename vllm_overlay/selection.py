"""Which fixes are on: the recipe names them, and a flag in the environment wins over it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from vllm_overlay.errors import ConfigError, did_you_mean, raise_all
from vllm_overlay.fix import Fix
from vllm_overlay.recipe import Recipe
from vllm_overlay.verdict import order

OFF = "0"


@dataclass(frozen=True)
class Chosen:
    """A fix with the value of its flag (None for a fix that has none) and who set it."""

    fix: Fix
    value: str | None
    value_from: str  # recipe | environment

    @property
    def on(self) -> bool:
        """Whether the fix is to be applied."""
        return self.value != OFF


def choose(recipe: Recipe, known: Mapping[str, Fix], environ: Mapping[str, str]) -> list[Chosen]:
    """Return the fixes that the recipe or the environment names, in the order of application.

    Raises ConfigError(s) for a fix that does not exist and for a value that a flag doesn't have.
    """
    errors: list[ConfigError] = []
    chosen: dict[str, Chosen] = {}
    for index, name in enumerate(recipe.fixes):
        if name in known:
            flag = known[name].flag
            value = recipe.env.get(flag.name, flag.default) if flag else None
            chosen[name] = Chosen(known[name], value, "recipe")
        else:
            errors.append(_unknown(recipe, index, name, known))
    for name, fix in known.items():
        if fix.flag is None:
            continue
        if fix.flag.name in environ:
            chosen[name] = Chosen(fix, environ[fix.flag.name], "environment")
        elif fix.flag.name in recipe.env and name not in recipe.fixes:
            errors.append(_unlisted(recipe, fix.flag.name, name))
    for choice in chosen.values():
        errors += _check_value(recipe, choice)
    raise_all(errors)
    return [chosen[fix.name] for fix in order([choice.fix for choice in chosen.values()])]


def check_flags(chosen: Sequence[Chosen], known: Collection[str]) -> list[ConfigError]:
    """Return each flag of a chosen fix that is a variable of this vLLM too (``known``).

    One value would then mean two things.
    """
    return [
        choice.fix.places.at("flag").error(
            f"the flag {choice.fix.flag.name} of the fix {choice.fix.name} is a variable of vLLM's "
            "own",
            remedy="give the fix another flag; if vLLM carries the fix now, leave the fix out",
        )
        for choice in chosen
        if choice.fix.flag is not None and choice.fix.flag.name in known
    ]


def _unknown(recipe: Recipe, index: int, name: str, known: Mapping[str, Fix]) -> ConfigError:
    place = recipe.places.at("fixes", index)
    remedy = did_you_mean(name, known) or f"known fixes: {', '.join(sorted(known)) or 'none'}"
    return ConfigError(
        "there is no such fix",
        file=place.file,
        line=place.line,
        column=place.column,
        found=repr(name),
        expected="the name of a folder in fixes/",
        remedy=remedy,
    )


def _unlisted(recipe: Recipe, flag: str, name: str) -> ConfigError:
    place = recipe.places.at("env", flag)
    return ConfigError(
        f"the recipe sets the flag {flag} of a fix that it does not name",
        file=place.file,
        line=place.line,
        column=place.column,
        remedy=f"add {name} to fixes",
    )


def _check_value(recipe: Recipe, choice: Chosen) -> list[ConfigError]:
    flag = choice.fix.flag
    if flag is None or choice.value == OFF or choice.value in flag.values:
        return []
    place = recipe.places.at("env", flag.name) if choice.value_from == "recipe" else None
    return [
        ConfigError(
            f"the flag {flag.name} of the fix {choice.fix.name} has no such value",
            file=place.file if place else "environment",
            line=place.line if place else None,
            column=place.column if place else None,
            found=repr(choice.value),
            expected=" or ".join(dict.fromkeys((OFF, *flag.values))),
            remedy=f"set {flag.name} to one of them, or unset it",
        )
    ]
