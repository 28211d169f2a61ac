"""Writes an imported recipe, and makes sure that it loads."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vllm_overlay.errors import ConfigError, ConfigErrors
from vllm_overlay.recipe import load_recipe
from vllm_overlay.scalars import read_scalar


@dataclass
class Config:
    """One checkpoint with some features: what a server of it would be started with."""

    model: str
    vllm: str | None  # None: it wants a release that is not known
    summary: str
    serve: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def difference(base: Config, config: Config) -> dict[str, Any]:
    """Return what a variant of ``base`` must say to become ``config``."""
    body: dict[str, Any] = {"summary": config.summary}
    body |= {"vllm": config.vllm} if config.vllm != base.vllm else {}
    body |= {"model": config.model} if config.model != base.model else {}
    serve = {
        key: _over(base.serve.get(key), value)
        for key, value in config.serve.items()
        if key not in base.serve or base.serve[key] != value
    }
    env = {key: value for key, value in config.env.items() if base.env.get(key) != value}
    body["serve"] = {**serve, **{key: None for key in base.serve if key not in config.serve}}
    body["env"] = {**env, **{key: None for key in base.env if key not in config.env}}
    return {key: value for key, value in body.items() if value not in ("", {})}


def _over(base: Any, value: Any) -> Any:
    """Return what gives ``value`` when merged over ``base``: a map's keys cannot be removed."""
    return value if _covers(base, value) else json.dumps(value, ensure_ascii=False)


def _covers(base: Any, value: Any) -> bool:
    if not isinstance(base, dict) or not isinstance(value, dict):
        return True
    return all(key in value and _covers(item, value[key]) for key, item in base.items())


class _Dumper(yaml.SafeDumper):
    """Writes what our own strict reader takes: no anchors, and quotes around unclear text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = None if value.isprintable() and read_scalar(value) == (value, None) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def render(body: Mapping[str, Any], source: Path) -> str:
    """Return the text of a recipe. Raises ConfigError(s) if it would not load, variants too."""
    head = f"# Made by `vllm-overlay recipe import` from {json.dumps(source.name)[1:-1]}\n"
    words = yaml.dump(
        dict(body), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000
    )
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "recipe.yaml")
        file.write_text(head + words, encoding="utf-8")
        errors: list[ConfigError] = []
        for variant in (None, *body.get("variants", {})):
            try:
                load_recipe(str(file), folder=Path(scratch), variant=variant)
            except ConfigErrors as several:
                errors += several.errors
            except ConfigError as error:
                errors.append(error)
    if errors:
        found = {f"{error.what}; found {error.found}": error for error in errors}.values()
        what = "the recipe made from it would not load"
        raise ConfigErrors(
            [
                ConfigError(f"{what}: {error.what}", file=source, found=error.found)
                for error in found
            ]
        )
    return head + words


def save(text: str, file: Path) -> None:
    """Write a new recipe. Raises ConfigError if the file is there already, or cannot be written."""
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        remedy = "remove it first, or give another"
        raise ConfigError("the file is there already", file=file, remedy=remedy) from None
    except (OSError, ValueError) as error:
        what = "the recipe cannot be written"
        raise ConfigError(what, file=file, found=getattr(error, "strerror", error)) from None
