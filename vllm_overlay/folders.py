"""Where recipes, fixes, models and the overlay's own state lie on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.errors import ConfigError

IMAGE = Path("/opt/vllm-overlay")
FOLDER_VARIABLES = (
    "VLLM_OVERLAY_HOME",
    "VLLM_OVERLAY_RECIPES",
    "VLLM_OVERLAY_FIXES",
    "VLLM_OVERLAY_MODELS",
)


@dataclass(frozen=True)
class Folders:
    """``source`` says whose recipes and fixes are used: environment, mounted, checkout, image."""

    home: Path
    recipes: Path
    fixes: Path
    models: Path
    source: str


def home_folder(environ: Mapping[str, str]) -> Path:
    """Return the state folder: plans, receipts, caches. It need not exist yet."""
    named = environ.get("VLLM_OVERLAY_HOME")
    if named:
        return _absolute("VLLM_OVERLAY_HOME", named)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-overlay"


def find_folders(environ: Mapping[str, str], root: Path = Path("/")) -> Folders:
    """Return the folders in force. ``root`` is the file system's root; tests give another.

    Raises ConfigError for a folder variable that names no folder.
    """
    home = home_folder(environ)
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file():
        base, source = checkout, "checkout"
    else:
        base, source = root / IMAGE.relative_to("/"), "image"
    chosen = {}
    for name in ("recipes", "fixes"):
        variable = f"VLLM_OVERLAY_{name.upper()}"
        chosen[name] = base / name
        if (root / name).is_dir():
            chosen[name], source = root / name, "mounted"
        if environ.get(variable):
            chosen[name], source = _absolute(variable, environ[variable]), "environment"
        if not chosen[name].is_dir():
            raise ConfigError(
                f"the folder of {name} is missing",
                file=chosen[name],
                expected="a folder",
                remedy=f"mount it there, or name another with {variable}",
            )
    models = environ.get("VLLM_OVERLAY_MODELS")
    mounted_models = root / "models"
    if models:
        model_folder = _absolute("VLLM_OVERLAY_MODELS", models)
    else:
        model_folder = mounted_models if mounted_models.is_dir() else home / "models"
    return Folders(home, chosen["recipes"], chosen["fixes"], model_folder, source)


def _absolute(variable: str, value: str) -> Path:
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise ConfigError(
            f"{variable} is no absolute path", found=repr(value), remedy=f"write {path.absolute()}"
        )
    return path
