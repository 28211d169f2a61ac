"""Recipes and fixes of a test, and the vLLM that poses for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.pose import Pose
from vllm_overlay.errors import ConfigError, ConfigErrors
from vllm_overlay.folders import Folders
from vllm_overlay.resolve import Request, Resolution, resolve

ENVS = "environment_variables = {'VLLM_PORT': lambda: None}\n"


class Desk:
    """Recipes and fixes of a test, resolved against the posing vLLM."""

    def __init__(self, folder: Path, posed: Pose) -> None:
        self.folder, self.posed = folder, posed
        for name in ("recipes", "fixes", "models"):
            (folder / name).mkdir(parents=True)
        (posed.root / "vllm/envs.py").write_text(ENVS)

    def fix(self, name: str, **body: Any) -> None:
        """Write a fix that is on for this vLLM and adds one module."""
        manifest = {
            "schema": 1,
            "name": name,
            "summary": "for a test",
            "source": "this test",
            "vllm": ">=0.1.0",
            "modules": {f"vllm.{name.replace('-', '_')}": "new.py"},
            **body,
        }
        place = self.folder / "fixes" / name
        place.mkdir()
        (place / "new.py").write_text("")
        (place / "fix.yaml").write_text(yaml.safe_dump(manifest))

    def resolve(
        self, *extra: str, environ: dict[str, str] | None = None, **body: Any
    ) -> Resolution:
        """Resolve a recipe with these keys and the flags after ``--``."""
        return resolve(self.request(*extra, environ=environ, **body))

    def request(self, *extra: str, environ: dict[str, str] | None = None, **body: Any) -> Request:
        """Write a recipe with these keys, and return the request to resolve it."""
        recipe = {"schema": 1, "name": "r", "vllm": "0.1.0", "model": "org/m", **body}
        (self.folder / "recipes/r.yaml").write_text(yaml.safe_dump(recipe))
        places = {name: self.folder / name for name in ("recipes", "fixes", "models")}
        folders = Folders(home=self.folder / "home", source="environment", **places)
        environment = {"PYTHONPATH": str(self.posed.root), "POSE_LOG": str(self.posed.log)}
        return Request("r", None, extra, {**environment, **(environ or {})}, folders)

    def refusal(self, *extra: str, environ: dict[str, str] | None = None, **body: Any) -> str:
        """Return the lines in which a recipe is refused before there is a plan."""
        with pytest.raises((ConfigError, ConfigErrors)) as caught:
            self.resolve(*extra, environ=environ, **body)
        return str(caught.value)
