"""Checks of the model: every file there, whole and readable; or where it will be fetched from."""

from __future__ import annotations

import json
import os
from pathlib import Path

from vllm_overlay.doctor.check import FAIL, OK, WARN, Check, Look, failed
from vllm_overlay.errors import ConfigError
from vllm_overlay.modelconfig import AGAIN
from vllm_overlay.weights import read_shard, shard_names

TEMPLATES = ("chat_template.jinja", "chat_template.json")
OFFLINE = ("1", "on", "yes", "true")


def model(look: Look) -> list[Check]:
    """Check the model's folder; that it exists at all is a matter of the recipe."""
    if look.plan is None:
        return []
    folder = look.model_folder
    if folder is None:
        return [] if look.plan.model.startswith("/") else [_hub(look, look.plan.model)]
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return []  # the recipe is refused for it
    unreadable = [name for name in names if not os.access(folder / name, os.R_OK)]
    if unreadable:
        detail = f"{len(unreadable)} files of {folder} cannot be read ({unreadable[0]} …)"
        return [Check("model", FAIL, detail, "make them readable for this user")]
    try:
        shards = [read_shard(folder / name) for name in shard_names(folder)]
    except ConfigError as error:
        return failed("model", [error])
    short = [shard for shard in shards if shard.missing]
    if short:
        missing = sum(shard.missing for shard in short)
        detail = f"{len(short)} of {len(shards)} files lack {missing:,} bytes of their tensors"
        return [Check("model", FAIL, f"{detail} ({short[0].file} …)", AGAIN)]
    return [
        _template(look, folder)
        or Check("model", OK, f"{folder}: {len(shards)} whole safetensors files")
    ]


def _template(look: Look, folder: Path) -> Check | None:
    """Return a warning for a model without a chat template."""
    if "chat-template" in look.serve or any((folder / name).is_file() for name in TEMPLATES):
        return None
    file = folder / "tokenizer_config.json"
    try:
        if json.loads(file.read_bytes()).get("chat_template"):
            return None
    except (OSError, ValueError, AttributeError):
        pass
    detail = f"{folder} has no chat template: /v1/chat/completions will refuse every request"
    return Check("model", WARN, detail, "add chat_template.jinja, or set the flag chat-template")


def _hub(look: Look, name: str) -> Check:
    env = look.env
    cache = Path(env.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
    cache = Path(env.get("HF_HUB_CACHE") or cache)
    there = any((cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*"))
    if there:
        return Check("model", OK, f"{name} is in {cache}")
    if env.get("HF_HUB_OFFLINE", "").lower() in OFFLINE:
        detail = f"{name} is not in {cache}, and HF_HUB_OFFLINE forbids to fetch it"
        return Check("model", FAIL, detail, "fetch it once, or name a folder as the model")
    return Check("model", OK, f"{name} is fetched from its hub at the start")
