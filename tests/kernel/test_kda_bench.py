"""What bench.kda_step times, in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.kernels import FIXES, interpreted, release
from tests.support.plans import write_fixes_plan


def test_the_forms_do_the_same_steps(tmp_path: Path) -> None:
    tree = release("0.33.0")
    plan = write_fixes_plan(FIXES, tmp_path, tree=tree, names={"glm5next-recoverssm"})
    done = interpreted("-m", "tests.support.kda_bench", home=tmp_path, plan=plan, tree=tree)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"stock", "exact", "fast", "k3", "fast-raw"}
    assert max(found["stock"]) == 0.0
    for form in ("fast", "fast-raw", "k3"):
        assert max(found[form]) < 0.004, found  # outputs are bfloat16
