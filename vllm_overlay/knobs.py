"""Every knob that a user can turn; ``python -m vllm_overlay.knobs`` writes docs/KNOBS.md.

The names and defaults come from where each knob is defined: the file formats, the fixes, the
command line, Dockerfile, compose files and Makefile. Only what a knob means is written here, and a
knob without a meaning, or a meaning without a knob, is an error.
"""

from __future__ import annotations

import json
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import typer
from pydantic import BaseModel

from vllm_overlay.border import raise_problems
from vllm_overlay.cli import app
from vllm_overlay.errors import ConfigError, ConfigErrors
from vllm_overlay.fix import load_fixes
from vllm_overlay.fix_format import FixModel, FlagModel, NeedModel
from vllm_overlay.recipe_format import (
    CACHE_VARIABLES,
    ExpectModel,
    NodesModel,
    RecipeModel,
    RequiresModel,
    VariantModel,
)

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Knob:
    """One line of the list; ``default`` is empty where there is none."""

    name: str
    default: str
    text: str


@dataclass(frozen=True)
class Group:
    """Knobs that are set in one place."""

    title: str
    where: str
    knobs: tuple[Knob, ...]


OVERLAY = (
    Knob("VLLM_OVERLAY_HOME", "~/.cache/vllm-overlay; /var/lib/vllm-overlay in the image",
         "the folder of plans, receipts, patched sources, caches and fetched releases"),
    Knob("VLLM_OVERLAY_RECIPES", "/recipes if mounted, else recipes/ of the checkout or the image",
         "the folder of recipes"),
    Knob("VLLM_OVERLAY_FIXES", "/fixes if mounted, else fixes/ of the checkout or the image",
         "the folder of fixes"),
    Knob("VLLM_OVERLAY_MODELS", "/models if mounted, else models in VLLM_OVERLAY_HOME",
         "the folder in which a recipe's model is looked up by name"),
    Knob("VLLM_OVERLAY_PLAN", "set by vllm-overlay serve",
         "the plan that a process applies; do not set it yourself"),
    Knob("NODE_RANK", "", "which of a recipe's nodes this machine is; 0 is the head"),
    Knob("HEAD_ADDR", "",
         "the head's name or address, on every node; with :PORT another rendezvous than the "
         "recipe's master-port, or 29501"),
    Knob("XDG_CACHE_HOME", "~/.cache", "the folder in which VLLM_OVERLAY_HOME lies by default"),
)  # fmt: skip
COMPOSE = {
    "RECIPE": "the recipe that is served",
    "VARIANT": "the variant of the recipe",
    "PORT": "the port of this machine on which the server listens",
    "IMAGE": "the image that is run, or the name of the one that is built",
    "MODELS_DIR": "the folder of this machine that is mounted as /models",
    "SHM_SIZE": "the size of /dev/shm",
    "WHEELS_DIR": "a folder with torch's CPU wheel for the build of the CPU image",
    "NODE_RANK": "which of the recipe's nodes this machine is; 0 is the head",
    "HEAD_ADDR": "the head's address, the same on every node",
    "RESTART": "Docker's restart policy of a node; `no` to try things out",
    "VLLM_HOST_IP": "this node's address for vLLM; derived if empty",
    "GLOO_SOCKET_IFNAME": "the interface that the ranks on a CPU talk over; derived if empty",
    "NCCL_SOCKET_IFNAME": "the interface over which GPUs find each other; derived if empty",
    "RAY_AUTH_TOKEN": "the secret that Ray's nodes know each other by, the same on each",
    "RAY_ADDRESS": "a running Ray cluster; empty: the head starts one",
    "NCCL_IB_HCA": "the RDMA devices that NCCL uses",
    "UCX_NET_DEVICES": "the devices that UCX uses",
    "HF_HUB_OFFLINE": "1: use no model hub",
    "HF_TOKEN": "the token for a model hub; a secret, never in a recipe",
    "VLLM_API_KEY": "the key that clients must send; a secret, never in a recipe",
}
BUILD = {
    "CUDA_BASE": "the base of the cuda image",
    "CPU_BASE": "the base of the cpu image",
    "TORCH_VERSION": "the release of torch in the cpu image",
    "TORCH_INDEX": "the package index that has torch's CPU build",
    "RAY": "1: Ray too, for recipes with distributed-executor-backend ray",
    "VLLM_VERSION": "the release of vLLM in the cuda image; it has a lock file of its own",
    "VLLM_BUILD": "wheel, or source to build vLLM from its source distribution",
    "TORCH_CUDA_ARCH_LIST": "the GPU architectures of a source build",
    "KDA_ARCHS": "the GPUs of the KDA library, as compute capabilities without dot; empty: none",
    "MAX_JOBS": "how many compilers a source build runs at once",
}
MAKE = {
    "PYTHON": "the Python that makes the environment",
    "TORCH_INDEX": "the package index that has torch's CPU build",
    "PORT": "the port of `make demo`; the recipe's if empty",
    "ARGS": "more arguments of the command that the target runs",
}
FROM_HOST = {"HOME"}  # in a compose file, but no knob of ours


def registry(root: Path = ROOT) -> list[Group]:
    """Return every knob of a checkout. Raises ConfigError(s) for one that is not described."""
    fixes = load_fixes(root / "fixes").values()
    flags = [(fix, fix.flag) for fix in fixes if fix.flag is not None]
    passed = compose_knobs(root / "compose")
    compose = {name: passed[name] for name in passed if name not in {f.name for _, f in flags}}
    return [
        Group("The overlay", "environment variables", OVERLAY),
        Group("The flags of the fixes", "environment variables; they win over the recipe", tuple(
            Knob(flag.name, f"{flag.default} if a recipe lists {fix.name}, else 0",
                 f"{fix.summary} ({', '.join(flag.values)})")
            for fix, flag in flags
        )),
        Group("Compose", "environment variables, or compose/.env",
              _described(compose, COMPOSE, root / "compose")),
        Group("The image", "build arguments (`--build-arg`; from the environment with compose)",
              _described(build_arguments(root / "Dockerfile"), BUILD, root / "Dockerfile")),
        Group("Make", "`make TARGET NAME=value`",
              _described(make_variables(root / "Makefile"), MAKE, root / "Makefile")),
        Group("A recipe", "recipes/NAME.yaml", _recipe_keys()),
        Group("A fix", "fixes/NAME/fix.yaml", _fix_keys()),
        Group("The command line", "`vllm-overlay COMMAND`", tuple(command_options())),
        Group("Caches", "set by `vllm-overlay serve` from the plan's cache key", tuple(
            Knob(name, f"caches/KEY/{kind} in VLLM_OVERLAY_HOME",
                 "if you set it, a folder KEY in that folder is used")
            for name, kind in CACHE_VARIABLES.items()
        )),
    ]  # fmt: skip


def build_arguments(dockerfile: Path) -> dict[str, str]:
    """Return the build arguments of a Dockerfile with their defaults."""
    text = dockerfile.read_text(encoding="utf-8")
    return dict(re.findall(r"^ARG (\w+)(?:=(.*))?$", text, re.MULTILINE))


def make_variables(makefile: Path) -> dict[str, str]:
    """Return the variables of a Makefile that its caller may set, with their defaults."""
    text = makefile.read_text(encoding="utf-8")
    return {name: value.strip() for name, value in re.findall(r"(?m)^(\w+) \?=(.*)$", text)}


def compose_knobs(folder: Path) -> dict[str, str]:
    """Return the variables of the compose files with their defaults."""
    found: dict[str, set[str]] = {}
    for file in sorted(folder.glob("*.yaml")):
        text = re.sub(r"(?m)(^|\s)#.*$", "", file.read_text(encoding="utf-8"))
        while match := re.search(r"\$\{(\w+)(?::?([-?])([^{}]*))?\}", text):
            name, kind, value = match.groups()
            found.setdefault(name, set()).add(value if kind == "-" else "")
            text = text[: match.start()] + f"${name}" + text[match.end() :]
        for name in re.findall(r"(?m)^ +([A-Z][A-Z0-9_]+):\s*$", text):  # passed through
            found.setdefault(name, set()).add("")
    return {
        name: " or ".join(sorted(values)) for name, values in found.items() if name not in FROM_HOST
    }


def command_options() -> Iterable[Knob]:
    """Yield the options of every command."""
    return _options(typer.main.get_command(app), "")


def _options(command: Any, name: str) -> Iterable[Knob]:
    for below in sorted(getattr(command, "commands", ())):
        yield from _options(command.commands[below], f"{name} {below}".lstrip())
    for option in command.params if name else ():
        if option.param_type_name == "option" and option.name != "help":
            names = "/".join([*option.opts, *option.secondary_opts])
            default = "" if option.default in (None, False) else str(option.default)
            yield Knob(f"{name} {names}", default, option.help or "")


def render(groups: Iterable[Group]) -> str:
    """Return the text of docs/KNOBS.md."""
    lines = [
        "# Knobs",
        "",
        "Every knob, where it is set, and its default. This file is generated by `make docs`.",
    ]
    for group in groups:
        lines += ["", f"## {group.title}", "", f"Where: {group.where}.", ""]
        lines += ["| knob | default | meaning |", "|---|---|---|"]
        for knob in group.knobs:
            lines.append(f"| `{_cell(knob.name)}` | {_cell(knob.default)} | {_cell(knob.text)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _described(
    found: Mapping[str, str], meanings: Mapping[str, str], file: Path
) -> tuple[Knob, ...]:
    """Return knobs with their meanings; ConfigError(s) where the two do not match."""
    errors = [
        ConfigError(f"the knob '{name}' has no meaning in knobs.py", file=file)
        for name in sorted(found.keys() - meanings.keys())
    ] + [
        ConfigError(f"knobs.py describes '{name}', which is no knob", file=file)
        for name in sorted(meanings.keys() - found.keys())
    ]
    raise_problems(errors, file)
    return tuple(Knob(name, found[name], text) for name, text in meanings.items())


def _recipe_keys() -> tuple[Knob, ...]:
    keys = ", ".join(knob.name for knob in _keys(VariantModel))
    return (
        *_keys(RecipeModel),
        Knob("variants.NAME", "", f"merged over the recipe; its keys: {keys} (map)"),
        *_keys(RequiresModel, "requires."),
        *_keys(NodesModel, "nodes."),
        *_keys(ExpectModel, "smoke.expect[]."),
    )


def _fix_keys() -> tuple[Knob, ...]:
    return (
        *_keys(FixModel),
        *_keys(FlagModel, "flag."),
        *_keys(NeedModel, "needs[]."),
    )


def _keys(model: type[BaseModel], prefix: str = "") -> list[Knob]:
    """Return the keys of a map of a file format, those that it must have first."""
    required: list[Knob] = []
    optional: list[Knob] = []
    for name, field in model.model_fields.items():
        must = field.is_required()
        kind = _kind(field.annotation) + (", required" if must else "")
        plain = isinstance(field.default, str | int | list) and not must
        default = json.dumps(field.default) if plain and field.default else ""
        knob = Knob(f"{prefix}{field.alias or name}", default, f"{field.description} ({kind})")
        (required if must else optional).append(knob)
    return required + optional


def _kind(annotation: Any) -> str:
    """Return the type of a key in the words of a YAML file."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(parts[0])
    if origin in (typing.Union, UnionType):
        return " or ".join(_kind(part) for part in parts if part is not NoneType)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "map"
    words = {dict: "map", list: "list", str: "text", bool: "true or false", float: "number"}
    return words.get(origin or annotation, "whole number")


def main() -> None:
    """Write docs/KNOBS.md of the checkout."""
    try:
        text = render(registry())
    except (ConfigError, ConfigErrors) as error:
        sys.exit(str(error))
    (ROOT / "docs" / "KNOBS.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
