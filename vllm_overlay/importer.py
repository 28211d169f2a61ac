"""Turns a file of the vllm-project/recipes collection (models/<org>/<name>.yaml) into a recipe.

The collection's file is a menu: checkpoints, features, hardware and serving strategies, which its
site puts together into a command. Here the default checkpoint with the features that are on by
default becomes the recipe; each other checkpoint and each feature that is off by default becomes
a variant. What depends on anything outside of the file is left out and said, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from vllm_overlay.errors import ConfigError, UsageError
from vllm_overlay.importer_args import apply_settings, left_out, read_variables, read_words
from vllm_overlay.importer_write import Config, difference
from vllm_overlay.importer_yaml import (
    child,
    items,
    mapping,
    one_line,
    read_foreign,
    text,
    version,
)
from vllm_overlay.recipe_format import is_name
from vllm_overlay.yamlio import Node, Place, shorten

# What the keys of each map of the file are to a recipe: taken over, for people only, or why not.
TAKEN, PEOPLE = "taken", "people"
GPUS = "it depends on the GPUs"
ELSEWHERE = "its flags lie in another file of the collection"
IMAGE = "the image is yours: see the Dockerfile"
KEYS: Mapping[str, Mapping[str, str]] = {
    "": {
        **dict.fromkeys(("meta", "model", "features", "opt_in_features", "variants"), TAKEN),
        **dict.fromkeys(("hardware_overrides", "strategy_overrides", "dependencies"), TAKEN),
        **dict.fromkeys(("default_strategy", "compatible_strategies", "omni"), TAKEN),
        **dict.fromkeys(("strategy_hardware", "strategy_min_gpus", "hardware_notes"), GPUS),
        **dict.fromkeys(("kv_offload_support", "kv_cache_strategy_hardware"), ELSEWHERE),
        "guide": PEOPLE,
    },
    "model": {
        **dict.fromkeys(("model_id", "min_vllm_version", "nightly_required"), TAKEN),
        **dict.fromkeys(("base_args", "base_env"), TAKEN),
        **dict.fromkeys(("docker_image", "install"), IMAGE),
        **dict.fromkeys(("architecture", "parameter_count", "active_parameters"), PEOPLE),
        "context_length": PEOPLE,
    },
    "variant": {
        **dict.fromkeys(("model_id", "min_vllm_version", "nightly_required", "tp"), TAKEN),
        **dict.fromkeys(("extra_args", "extra_env", "default_modes", "description"), TAKEN),
        "hardware_overrides": TAKEN,
        **dict.fromkeys(("precision", "label"), PEOPLE),
        **dict.fromkeys(("supported_hardware", "precision_hardware"), GPUS),
        "vram_minimum_gb": "it is of all GPUs together: set requires.gpus and gpu-memory",
        "docker_image": IMAGE,
    },
    "feature": {
        **dict.fromkeys(("description", "args", "env", "modes", "default_mode"), TAKEN),
        **dict.fromkeys(("hardware_overrides", "strategies", "companion"), TAKEN),
        "label": PEOPLE,
    },
    "mode": {
        **dict.fromkeys(("description", "args", "env", "variants"), TAKEN),
        **dict.fromkeys(("hardware_overrides", "hardware"), TAKEN),
        "label": PEOPLE,
    },
    "override": {
        **dict.fromkeys(("extra_args", "extra_env", "args", "vllm_args", "env", "tp"), TAKEN),
        "hardware_overrides": TAKEN,
        **dict.fromkeys(("docker_image", "install"), IMAGE),
    },
}
# Keys of hardware_overrides that name many GPUs; the collection applies those of one GPU earlier.
KINDS = ("hopper", "blackwell", "ada", "ampere", "nvidia", "amd", "cpu", "xpu", "tpu", "npu")
STRATEGY = "single_node_tp"  # the collection's own default


@dataclass(frozen=True)
class Imported:
    """A recipe's data, ready to be written, and what was not carried over, one line each."""

    body: Mapping[str, Any]
    notes: tuple[ConfigError, ...]


def convert(file: Path, name: str | None, vllm: str | None, hardware: Sequence[str]) -> Imported:
    """Return the recipe of a file of the collection.

    ``name`` is the recipe's (else the file's slug, else the file's own), ``vllm`` the release that
    it is for (else the least that the file names), ``hardware`` the keys of the file's hardware
    overrides that are taken. Raises ConfigError or UsageError.
    """
    root = read_foreign(file)
    missing = [key for key in ("model", "variants") if not isinstance(child(root, key).value, dict)]
    if missing or text(child(root, "model"), "model_id") is None:
        raise root.place.error(
            "this is no file of the vllm-project/recipes form",
            expected="its models/<org>/<name>.yaml: the maps 'model' (with 'model_id'), 'variants'",
        )
    tasks = child(root, "meta", "tasks")
    if any(item.value == "omni" for item in items(tasks)) or root.child("omni"):
        raise tasks.place.error("this is a recipe of vLLM-Omni", remedy="vllm serve cannot run it")
    try:
        release = str(Version(vllm)) if vllm else None
    except InvalidVersion:
        raise UsageError("--vllm is no release", found=vllm, expected="such as 0.33.0") from None
    return _Menu(root, file, release, tuple(hardware)).recipe(name)


class _Menu:
    """One file of the collection, and what was said about it so far."""

    def __init__(self, root: Node, file: Path, vllm: str | None, hardware: tuple[str, ...]) -> None:
        self.root, self.file, self.vllm, self.hardware = root, file, vllm, hardware
        self.notes: dict[str, ConfigError] = {}
        self.people: set[str] = set()
        self.found: set[str] = set()  # the keys of hardware overrides
        self.strategy = text(root, "default_strategy") or STRATEGY

    def recipe(self, name: str | None) -> Imported:
        slug, stem = text(self.root, "meta", "slug"), self.file.stem
        name = name or (slug if slug and is_name(slug) else stem)
        if not is_name(name) or "/" in name:
            raise UsageError("this cannot name a recipe", found=name, remedy="give --name NAME")
        base = self.config("default", ())
        if base.vllm is None:
            raise self.no_release()
        variants = dict(self.variants(base))
        self.about_the_file(base)
        body: dict[str, Any] = {"schema": 1, "name": name, "summary": base.summary}
        body |= {"vllm": base.vllm, "model": base.model, "serve": base.serve, "env": base.env}
        body["variants"] = {key: difference(base, config) for key, config in variants.items()}
        if unknown := [key for key in self.hardware if key not in self.found]:
            known = ", ".join(sorted(self.found)) or "none"
            what = "the file has no overrides for this hardware"
            raise UsageError(what, found=unknown[0], expected=f"of the file's: {known}")
        kept = {key: value for key, value in body.items() if value not in ("", {})}
        ordered = sorted(self.notes.values(), key=lambda note: (note.line or 0, note.column or 0))
        return Imported(kept, tuple(ordered))

    def note(self, *errors: ConfigError) -> None:
        self.notes |= {str(error): error for error in errors}

    def left(self, place: Place, what: str, why: str) -> None:
        self.note(left_out(place, what, why))

    def sort_out(self, node: Node, kind: str, path: str) -> None:
        """Say of every key of a map that is not taken over what becomes of it."""
        for key in node.value if isinstance(node.value, dict) else ():
            fate = KEYS[kind].get(key, "this importer does not know the key")
            where = f"{path}.{key}".lstrip(".")
            if fate == PEOPLE:
                self.people.add(where)
            elif fate != TAKEN and child(node, key).value not in (None, {}, ()):
                self.left(node.keys[key], shorten(where, 100), fate)

    # What a checkpoint is started with, in the collection's own order

    def config(self, variant: str, features: Sequence[tuple[str, str | None]]) -> Config:
        """Return the checkpoint ``variant`` with its own features and some more, by (key, mode)."""
        model, node = child(self.root, "model"), child(self.root, "variants", variant)
        path = f"variants.{variant}"
        self.sort_out(model, "model", "model")
        self.sort_out(node, "variant", path)
        config = Config(
            model=text(node, "model_id") or text(model, "model_id") or "",
            vllm=self.release(node),
            summary=one_line(text(node, "description") if variant != "default" else self.title()),
        )
        self.add(config, model, "base_args", "base_env")
        self.add(config, node, "extra_args", "extra_env")
        exact = [key for key in self.hardware if key not in KINDS]
        self.add_hardware(config, node, path, exact)
        self.add_parallelism(config, node, path)
        overrides = child(self.root, "strategy_overrides", self.strategy)
        if self.strategy == STRATEGY:
            self.sort_out(overrides, "override", f"strategy_overrides.{STRATEGY}")
            self.add(config, overrides, "extra_args", "extra_env")
            self.add(config, overrides, "vllm_args", "env")
        kinds = [key for key in self.hardware if key in KINDS]
        own = child(overrides, "hardware_overrides")
        if self.strategy == STRATEGY and any(own.child(key) for key in kinds):
            self.note_hardware(self.root, "", kinds)
            self.note_hardware(node, path, kinds)
        else:
            self.add_hardware(config, self.root, "", self.hardware)
            self.add_hardware(config, node, path, kinds)
        if self.strategy == STRATEGY:
            self.add_hardware(config, overrides, f"strategy_overrides.{STRATEGY}", self.hardware)
        chosen = [*self.default_features(variant, node), *features]
        for key, mode in chosen:
            self.add_feature(config, key, mode)
        return config

    def add(self, config: Config, node: Node, args: str, env: str) -> None:
        words = child(node, args)
        settings, notes = read_words(items(words))
        self.note(*notes, *apply_settings(config.serve, settings))
        variables, notes = read_variables(child(node, env))
        self.note(*notes)
        config.env |= variables

    def add_hardware(self, config: Config, node: Node, path: str, keys: Sequence[str]) -> None:
        self.note_hardware(node, path, ())
        for key in keys:
            block = child(node, "hardware_overrides", key)
            self.sort_out(block, "override", f"{path}.hardware_overrides.{key}".lstrip("."))
            self.add(config, block, "extra_args", "extra_env")

    def note_hardware(self, node: Node, path: str, replaced: Sequence[str]) -> None:
        """Say of the overrides of a map that they are not taken, but for the chosen ones."""
        blocks = child(node, "hardware_overrides")
        for key in blocks.value if isinstance(blocks.value, dict) else ():
            self.found.add(key)
            where = f"{path}.hardware_overrides.{key}".lstrip(".")
            if key in replaced:
                self.left(blocks.keys[key], where, f"strategy_overrides.{STRATEGY} replaces it")
            elif key not in self.hardware and child(blocks, key).value not in (None, {}):
                self.left(blocks.keys[key], where, f"{GPUS}; --hardware {key} takes it")

    def add_parallelism(self, config: Config, node: Node, path: str) -> None:
        """Add what the file declares; the collection derives the rest from a GPU's memory."""
        if self.strategy != STRATEGY:
            return
        for declared in (child(node, "tp"), child(self.root, "strategy_overrides", STRATEGY, "tp")):
            if isinstance(declared.value, dict):
                keys = [key for key in (*self.hardware[::-1], "default") if key in declared.value]
                self.found |= set(declared.value) - {"default"}
                if not keys:
                    self.left(declared.place, f"{path}.tp", f"{GPUS}; --hardware takes it")
                declared = child(declared, *keys[:1]) if keys else Node(declared.place, None)
            if type(declared.value) is int:
                config.serve["tensor-parallel-size"] = declared.value
                return

    # Features

    def default_features(self, variant: str, node: Node) -> Iterator[tuple[str, str | None]]:
        """Yield the features that the collection turns on for a checkpoint, with their modes."""
        off = {item.value for item in items(child(self.root, "opt_in_features"))}
        steered = child(node, "default_modes")
        for key in mapping(child(self.root, "features")):
            if key not in off or steered.child(key):
                modes = self.modes(key, variant)
                first = text(steered, key), text(self.root, "features", key, "default_mode")
                chosen = [mode for mode in first if mode in modes] + modes
                if modes or not mapping(child(self.root, "features", key, "modes")):
                    yield key, chosen[0] if chosen else None

    def modes(self, feature: str, variant: str) -> list[str]:
        """Return the modes of a feature that the file allows for a checkpoint."""
        found = []
        for key, mode in mapping(child(self.root, "features", feature, "modes")).items():
            only = [item.value for item in items(child(mode, "variants"))]
            bad = {
                k for k, v in mapping(child(mode, "hardware")).items() if v.value == "unsupported"
            }
            if (not only or variant in only) and not bad & set(self.hardware):
                found.append(key)
        return found

    def add_feature(self, config: Config, key: str, mode: str | None) -> None:
        feature = child(self.root, "features", key)
        path, place = f"features.{key}", feature.place
        self.sort_out(feature, "feature", path)
        if feature.child("companion"):
            self.left(place, path, "it needs a second process beside the server")
            return
        allowed = [item.value for item in items(child(feature, "strategies"))]
        if allowed and self.strategy not in allowed:
            self.left(place, path, f"the file does not offer it for {self.strategy}")
            return
        if mode is not None:
            feature, path = child(feature, "modes", mode), f"{path}.modes.{mode}"
            self.sort_out(feature, "mode", path)
        self.note_hardware(feature, path, ())
        blocks = [child(feature, "hardware_overrides", key) for key in self.hardware]
        block = next((block for block in reversed(blocks) if block.value), Node(place, None))
        self.add(config, block if block.child("args") else feature, "args", "")
        self.add(config, block if block.child("env") else feature, "", "env")

    # Variants

    def variants(self, base: Config) -> Iterator[tuple[str, Config]]:
        """Yield a variant for each other checkpoint, and for each feature that is off."""
        nodes = child(self.root, "variants")
        names = [key for key in mapping(nodes) if key != "default"]
        for key in names:
            config = self.config(key, ())
            if config.vllm is not None:
                yield key, config
                continue
            why = "it wants a later vLLM than --vllm, or a nightly build, which is no release"
            self.left(nodes.keys[key], f"variants.{key}", why)
        default = child(nodes, "default")
        on = {key for key, _ in self.default_features("default", default)}
        for key, feature in mapping(child(self.root, "features")).items():
            several = bool(mapping(child(feature, "modes")))
            modes: Sequence[str | None] = self.modes(key, "default") if several else [None]
            if not modes:
                self.left(feature.place, f"features.{key}", "no mode of it is for this checkpoint")
            for mode in modes if key not in on else ():
                name = f"{key}-{mode}" if mode else key
                if name in names:
                    self.left(feature.place, f"features.{key}", "a variant has its name")
                    continue
                config = self.config("default", [(key, mode)])
                config.summary = one_line(text(feature, "description"))
                if (config.serve, config.env) != (base.serve, base.env):
                    yield name, config

    # The file as a whole

    def title(self) -> str | None:
        return text(self.root, "meta", "description") or text(self.root, "meta", "title")

    def release(self, variant: Node) -> str | None:
        """Return the release for a checkpoint; None if it wants one that is not known."""
        model = child(self.root, "model")
        least = variant.child("min_vllm_version") or model.child("min_vllm_version")
        nightly = True in (
            child(variant, "nightly_required").value,
            child(model, "nightly_required").value,
        )
        if self.vllm is None:
            return None if nightly or least is None else str(version(least))
        return None if least and Version(self.vllm) < version(least) else self.vllm

    def no_release(self) -> UsageError:
        node = child(self.root, "model", "min_vllm_version")
        found = f"at least {node.written}" if node.written else "no version"
        if self.vllm is not None:
            return UsageError(f"--vllm {self.vllm} is too old for this file", found=found)
        return UsageError(
            "the file does not say which release of vLLM to pin", file=self.file, found=found,
            expected="a minimum that is not a nightly build", remedy="give --vllm VERSION",
        )  # fmt: skip

    def about_the_file(self, base: Config) -> None:
        """Say what of the whole file was not carried over."""
        root, place = self.root, self.root.place
        self.sort_out(root, "", "")
        least = child(root, "model", "min_vllm_version")
        if self.vllm is None:
            why = f"a recipe is for one release, so it pins {base.vllm}; --vllm names another"
            self.left(least.place, f"'or later' of vLLM {least.written}", why)
        elif child(root, "model", "nightly_required").value is True:
            what = f"the wish for a nightly build: the recipe pins {self.vllm}"
            self.left(child(root, "model", "nightly_required").place, what, "you said so")
        for item in items(child(root, "dependencies")):
            command = text(item, "command") or "a dependency without a command"
            self.left(item.place, shorten(command, 150), "install it into the image")
        for item in items(child(root, "compatible_strategies")):
            self.left(item.place, f"what the strategy {shorten(item.written)} adds", ELSEWHERE)
        if self.strategy != STRATEGY:
            self.left(place, f"default_strategy {shorten(self.strategy)}", ELSEWHERE)
        for key in mapping(child(root, "strategy_overrides")):
            if key != self.strategy or key != STRATEGY:
                node = child(root, "strategy_overrides")
                self.left(node.keys[key], f"strategy_overrides.{key}", "it is of that strategy")
        if "tensor-parallel-size" not in base.serve:
            why = "the collection derives it from the GPUs and the model's size: add it to serve"
            self.left(place, "tensor-parallel-size", why)
        meta = mapping(child(root, "meta"))
        self.people |= {f"meta.{key}" for key in meta if key not in ("title", "description")}
        if self.people:
            self.left(place, "what is only for people", ", ".join(sorted(self.people)))
