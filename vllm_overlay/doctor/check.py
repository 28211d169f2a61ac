"""What a check says, and what it looks at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.errors import ConfigError
from vllm_overlay.fix import Fix
from vllm_overlay.host import Gpu
from vllm_overlay.plan import Plan
from vllm_overlay.subject import count, rank_count

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Check:
    """One finding. ``state`` is ok, warn or fail; a fail stops a launch.

    ``detail`` may have several lines. ``remedy`` says what to do, and is empty for an ok.
    """

    name: str
    state: str
    detail: str
    remedy: str = ""

    def line(self) -> str:
        """Return the finding as one line."""
        detail = f"{self.name}: " + self.detail.replace("\n", "; ")
        return str(ConfigError(detail, remedy=self.remedy or None))


@dataclass(frozen=True)
class Look:
    """What the checks look at.

    ``plan`` is None where no recipe is named: what depends on one is then left out. ``env`` is the
    environment that the server would have. ``root`` is the file system's root, as for /sys.
    """

    plan: Plan | None
    applied: tuple[Fix, ...]
    home: Path
    env: Mapping[str, str]
    gpus: tuple[Gpu, ...] = ()
    root: Path = Path("/")

    @property
    def serve(self) -> Mapping[str, Any]:
        """The serve flags in force."""
        return self.plan.serve if self.plan else {}

    @property
    def nodes(self) -> int:
        """How many nodes the engine spans: 2 stands for a cluster of Ray, whatever its size."""
        if self.serve.get("distributed-executor-backend") == "ray":
            return 2
        return count(self.serve, "nnodes")

    @property
    def ranks(self) -> int:
        """How many ranks of one replica this node runs, were they spread evenly."""
        return -(-rank_count(self.serve) // self.nodes)

    @property
    def model_folder(self) -> Path | None:
        """The model's folder; None for a model that is fetched from a hub."""
        folder = Path(self.plan.model) if self.plan else Path()
        try:
            return folder if folder.is_absolute() and folder.is_dir() else None
        except OSError:  # the recipe is refused for it
            return None


def failed(name: str, errors: Iterable[ConfigError]) -> list[Check]:
    """Return a failed check for each error."""
    return [Check(name, FAIL, error.told, error.remedy or "") for error in errors]


def refusals(checks: Sequence[Check]) -> list[ConfigError]:
    """Return the errors that stop a launch."""
    return [
        ConfigError(check.detail.replace("\n", "; "), remedy=check.remedy or None)
        for check in checks
        if check.state == FAIL
    ]
