"""A model folder's config.json, read strictly: what it says, or one line on what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.errors import ConfigError
from vllm_overlay.files import read_bytes

NAME = "config.json"
MAX_CONFIG = 16 * 1024 * 1024  # bytes; some list what is not quantized, layer by layer
AGAIN = "fetch the model again, whole"
ABSENT = object()


@dataclass(frozen=True)
class ModelConfig:
    """The values of a config.json, with ``hf-overrides`` over them; ``file`` is named in errors."""

    file: Path
    values: Mapping[str, Any]

    def get(self, path: str) -> Any:
        """Return the value at a dotted path, or ABSENT where there is none or it is null."""
        return look_up(self.values, path)

    def whole(self, path: str, *, least: int = 1, default: int | None = None) -> int:
        """Return a whole number of at least ``least``. Raises ConfigError for anything else."""
        value = self.get(path)
        if value is ABSENT and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        raise self.error(path, value, f"a whole number of at least {least}")

    def texts(self, path: str) -> list[str]:
        """Return a list of texts. Raises ConfigError for anything else."""
        value = self.get(path)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        raise self.error(path, value, "a list of texts")

    def error(self, path: str, value: object, expected: str) -> ConfigError:
        """Return the error for the value at ``path``."""
        found = "nothing" if value is ABSENT else json.dumps(value)[:60]
        return ConfigError(
            f"the model's config has no usable '{path}'",
            file=self.file,
            found=found,
            expected=expected,
            remedy=AGAIN,
        )


def look_up(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of maps, or ABSENT where there is none or it is null."""
    value: Any = values
    for part in path.split("."):
        if not isinstance(value, Mapping) or value.get(part) is None:
            return ABSENT
        value = value[part]
    return value


def read_model_config(folder: Path, overrides: object = None) -> ModelConfig:
    """Return the config.json of a model folder, with vLLM's ``hf-overrides`` merged over it.

    Raises ConfigError for a file that is missing, unreadable, no JSON object, or has a key twice.
    """
    file = folder / NAME
    data = read_bytes(file, MAX_CONFIG)
    try:
        values = json.loads(data, object_pairs_hook=_once)
    except _Refused as refused:
        raise ConfigError(f"{NAME} {refused}", file=file, remedy=AGAIN) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{NAME} is no JSON: {error.msg}",
            file=file,
            line=error.lineno,
            column=error.colno,
            remedy=AGAIN,
        ) from None
    except (UnicodeDecodeError, RecursionError):
        raise ConfigError(f"{NAME} is no JSON", file=file, remedy=AGAIN) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{NAME} is no JSON object", file=file, expected="{…}", remedy=AGAIN)
    return ModelConfig(file, _merged(values, overrides if isinstance(overrides, Mapping) else {}))


class _Refused(Exception):
    """JSON that Python's parser takes and a strict reader does not."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"has the key '{twice[:60]}' twice")
    return values


def _merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = _merged(old, value)
        else:
            result[key] = value
    return result
