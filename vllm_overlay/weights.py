"""The weights of a model folder, by the headers of its safetensors files: no tensor is read."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.errors import ConfigError
from vllm_overlay.files import unreadable
from vllm_overlay.modelconfig import AGAIN

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes, as the format itself allows


@dataclass(frozen=True)
class Shard:
    """One safetensors file: ``data`` bytes of tensors, of which ``missing`` are not in the file."""

    file: Path
    data: int
    missing: int


def shard_names(folder: Path) -> list[str]:
    """Return the names of the weight files: those of the index, or all where there is no index.

    Raises ConfigError for an index that cannot be read.
    """
    index = folder / INDEX
    try:
        if not index.is_file():
            return sorted(file.name for file in folder.glob("*.safetensors"))
        names = json.loads(index.read_bytes())["weight_map"].values()
        if all(isinstance(name, str) and Path(name).name == name for name in names):
            return sorted(set(names))
    except OSError as error:
        raise unreadable(index, error) from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        pass
    raise ConfigError(
        "the index of the weights cannot be used",
        file=index,
        expected="a 'weight_map' of tensors to file names",
        remedy=AGAIN,
    )


def read_shard(file: Path) -> Shard:
    """Return what a file's header says of its tensors. Raises ConfigError for a broken header."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER:
                raise ValueError
            tensors = json.loads(stream.read(length))
        ends = [item["data_offsets"][1] for name, item in tensors.items() if name != "__metadata__"]
        data = max(map(int, ends), default=0)
    except OSError as error:
        raise unreadable(file, error) from None
    except (struct.error, ValueError, KeyError, IndexError, AttributeError, TypeError):
        raise ConfigError(
            "this is no safetensors file, or only its beginning", file=file, remedy=AGAIN
        ) from None
    return Shard(file, data, max(8 + length + data - size, 0))


def weight_bytes(folder: Path) -> int:
    """Return the bytes of all tensors of a model folder. Raises ConfigError as read_shard does."""
    return sum(read_shard(folder / name).data for name in shard_names(folder))
