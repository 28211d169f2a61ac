"""That every process runs exactly the plan's fixes. Asked last: by now they have all worked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_overlay import health
from vllm_overlay.processes import vllm_processes
from vllm_overlay.runs import Run
from vllm_overlay.smoke.metrics import Metrics

GAUGE = "vllm_overlay_fix_applied"
ROUTE_FIX = "overlay-route"


@pytest.fixture(name="applied")
def applied_fixes(run: Run) -> set[str]:
    """The fixes that the receipts of live processes show applied."""
    receipts = health.receipts_of(vllm_processes(), run.folder.parent).values()
    ours = [receipt for receipt in receipts if receipt.plan == run.digest]
    return {fix for one in ours for fix in one.fixes if one.state(fix) == "applied"}


def check_receipts(run: Run) -> None:
    result = health.check_processes(run)
    assert result.ok, "\n".join(result.reasons)


def check_every_fix_is_applied_somewhere(run: Run, applied: set[str]) -> None:
    idle = set(run.fixes) - applied
    assert not idle, f"no process has imported what {', '.join(sorted(idle))} changes"


def check_overlay_metrics(run: Run, applied: set[str], metrics: Callable[[], Metrics]) -> None:
    if ROUTE_FIX not in run.fixes:
        pytest.skip(f"the fix {ROUTE_FIX} is not in this plan")
    found = metrics().named(GAUGE)
    missing = applied - {sample.labels["fix"] for sample in found}
    assert not missing, f"/metrics has no {GAUGE} of {', '.join(sorted(missing))}"
    wrong = [str(sample.labels) for sample in found if sample.value != 1]
    assert not wrong, f"{GAUGE} is not 1 for {', '.join(wrong)}"
