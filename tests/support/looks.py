"""What the doctor's checks look at, made up for a test; and children with limits of their own."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_overlay.doctor.check import Check, Look
from vllm_overlay.fix import Fix
from vllm_overlay.host import Gpu
from vllm_overlay.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
H200 = Gpu("NVIDIA H200", "9.0", 140 * GIB, 139 * GIB, "580.95.05", "GPU-0a")
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "--net", "--uts")
CHILD = """
import json, sys
from pathlib import Path
from tests.support import looks
checks = getattr(__import__("vllm_overlay.doctor." + sys.argv[1], fromlist="x"), sys.argv[2])(
    looks.look(home=Path(sys.argv[4]), root=Path(sys.argv[5]), **json.loads(sys.argv[3])))
print(json.dumps([[c.name, c.state, c.detail, c.remedy] for c in checks]))
"""


def plan_of(
    serve: Mapping[str, Any] | None = None,
    model: str = "m",
    requires: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path = Path("test.yaml"),
) -> Plan:
    """Return a plan with these keys and nothing else."""
    return Plan(
        cache_key="0123456789abcdef",
        recipe={"name": "test", "file": str(file), "variant": None},
        folders={},
        vllm={},
        model=model,
        served_model=model,
        serve=serve or {},
        env=env or {},
        fixes=(),
        overrides=(),
        requires=requires or {},
        smoke={},
        modules={},
    )


def look(
    serve: Mapping[str, Any] | None = None,
    *,
    plan: Plan | None = None,
    env: Mapping[str, str] | None = None,
    gpus: Sequence[Gpu] = (),
    applied: Sequence[Fix] = (),
    home: Path = Path("/tmp"),
    root: Path = Path("/"),
) -> Look:
    """Return what checks look at: a plan with these serve flags, on a machine without a GPU."""
    plan = plan_of(serve) if plan is None else plan
    return Look(plan, tuple(applied), home, env or {}, tuple(gpus), root)


def only(checks: Sequence[Check], state: str) -> Check:
    """Return the one finding, which must have this state, and a remedy unless it is ok."""
    (check,) = checks
    assert check.state == state, check
    assert bool(check.remedy) == (state != "ok"), check
    return check


def child(
    setup: str,
    check: Callable[[Look], list[Check]],
    home: Path = Path("/tmp"),
    *,
    namespace: bool = False,
    root: str = "/",
    **about: Any,
) -> list[Check]:
    """Return what a check finds in a child that first runs ``setup`` in a shell.

    ``namespace`` gives it mounts, a network and a host's name of its own.
    """
    words = [sys.executable, "-c", CHILD, check.__module__.rpartition(".")[2], check.__name__]
    words += [json.dumps(about), str(home), root]
    shell = ["sh", "-ec", f"{setup}\nexec {shlex.join(words)}"]
    if namespace:
        probe = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, check=False)
        if probe.returncode:
            pytest.skip(f"no namespaces here: {probe.stderr.strip()}")
    run = subprocess.run(
        [*(NAMESPACE if namespace else ()), *shell],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    return [Check(*item) for item in json.loads(run.stdout.splitlines()[-1])]
