"""Runs a program with fixes applied to the vLLM that is installed, without recipe and server.

``python -m tests.support.with_fixes FIX[,FIX] COMMAND…``; a dash for FIX applies none.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.support.plans import write_fixes_plan
from vllm_overlay.fix import load_fixes

ROOT = Path(__file__).parents[2]


def main(arguments: list[str]) -> None:
    names, *command = arguments
    env = {**os.environ}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    if names != "-":
        chosen = [load_fixes(ROOT / "fixes")[name] for name in names.split(",")]
        home = Path(tempfile.mkdtemp())
        plan = write_fixes_plan(ROOT / "fixes", home, names={fix.name for fix in chosen})
        env["VLLM_OVERLAY_PLAN"] = str(plan)
        env |= {fix.flag.name: "1" for fix in chosen if fix.flag}
        start = ROOT / "vllm_overlay" / "activate" / "vllm_overlay.pth"
        shutil.copy(start, sysconfig.get_paths()["purelib"])
    os.execvpe(command[0], command, env)


if __name__ == "__main__":
    main(sys.argv[1:])
