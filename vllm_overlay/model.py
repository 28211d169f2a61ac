"""Finds the model that a recipe names, and looks whether its folder can be served at all."""

from __future__ import annotations

from pathlib import Path

from vllm_overlay.errors import ConfigError
from vllm_overlay.recipe import Recipe
from vllm_overlay.weights import INDEX, shard_names

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "tiktoken.model",
)


def find_model(recipe: Recipe, models: Path) -> str:
    """Return the model as vLLM takes it: a folder's path, or a hub id (``org/name``).

    A bare name is a folder in ``models``. Raises ConfigError for a folder that is missing,
    empty, or without config, weights or tokenizer.
    """
    name = recipe.model
    if not name.startswith("/") and "/" in name:
        return name
    folder = Path(name) if name.startswith("/") else models / name
    place = recipe.places.at("model")
    reason = _unservable(folder, recipe)
    if reason is None:
        return str(folder)
    found, expected, remedy = reason
    raise ConfigError(
        f"the model {name} cannot be served",
        file=place.file,
        line=place.line,
        column=place.column,
        found=found,
        expected=expected,
        remedy=remedy,
    )


def _unservable(folder: Path, recipe: Recipe) -> tuple[str, str, str] | None:
    """Return (found, expected, remedy) for what is wrong with a model's folder, or None."""
    fetch = "put the model there, or name its folder's parent with VLLM_OVERLAY_MODELS"
    if not folder.is_dir():
        return f"no folder {folder}", "a model's folder", fetch
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        return f"{folder}: {error.strerror}", "a readable folder", "mend its permissions"
    if not names:
        return f"an empty folder {folder}", "config.json, weights and a tokenizer", fetch
    again = "fetch the model again, whole"
    if "config.json" not in names and "params.json" not in names:
        return f"no config.json in {folder}", "a model's folder", again
    missing = _missing_shards(folder)
    if missing:
        return f"{len(missing)} missing shards in {folder} ({missing[0]} …)", "all of them", again
    weights = any(next(folder.glob(pattern), None) for pattern in WEIGHTS)
    if not weights and recipe.serve.get("load-format") != "dummy":
        return f"no weights in {folder}", " or ".join(WEIGHTS), again
    own_tokenizer = "tokenizer" in recipe.serve or recipe.serve.get("skip-tokenizer-init") is True
    if not own_tokenizer and not set(names) & set(TOKENIZERS):
        return f"no tokenizer in {folder}", " or ".join(TOKENIZERS[:2]), again
    return None


def _missing_shards(folder: Path) -> list[str]:
    try:
        names = shard_names(folder)
    except ConfigError:
        return [INDEX]
    return [name for name in names if not (folder / name).is_file()]
