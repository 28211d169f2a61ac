"""`check`: every fix of a folder against one vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.evidence import with_evidence
from vllm_overlay.fix import load_fixes
from vllm_overlay.releases import find_tree
from vllm_overlay.verdict import Judged, judge, order


@dataclass(frozen=True)
class Checked:
    """The verdicts of a folder of fixes on one vLLM."""

    version: str
    path: Path
    judged: Sequence[Judged]

    @property
    def ok(self) -> bool:
        """Whether every fix applies, or is not needed any more."""
        return all(item.verdict in ("apply", "upstreamed") for item in self.judged)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
        return {
            "vllm": {"version": self.version, "path": str(self.path)},
            "fixes": [
                {
                    "name": item.fix.name,
                    "verdict": item.verdict,
                    "reasons": list(item.reasons),
                    "evidence": item.evidence,
                }
                for item in self.judged
            ],
        }


def check_fixes(vllm: str | None, folder: Path, home: Path) -> Checked:
    """Judge the fixes in ``folder`` on a release, wheel, folder, or the installed vLLM."""
    tree = find_tree(vllm, home)
    fixes = order(list(load_fixes(folder).values()))
    judged = with_evidence(judge(fixes, tree), tree, home)
    return Checked(tree.version, tree.root / "vllm", judged)
