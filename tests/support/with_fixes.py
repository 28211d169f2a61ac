"""Runs a program with fixes applied to the vLLM that is installed, without recipe and server.

``python -m tests.support.with_fixes FIX[=VALUE][,FIX] COMMAND…``: VALUE is its flag's, else the
flag has its default. A dash for FIX applies none.
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
        known, home = load_fixes(ROOT / "fixes"), Path(tempfile.mkdtemp())
        asked = dict(item.partition("=")[::2] for item in names.split(","))
        values = {name: value for name, value in asked.items() if value}
        plan = write_fixes_plan(ROOT / "fixes", home, names=set(asked), values=values)
        env["VLLM_OVERLAY_PLAN"] = str(plan)
        for name in asked:
            if flag := known[name].flag:
                env[flag.name] = values.get(name, flag.default)
        start = ROOT / "vllm_overlay" / "activate" / "vllm_overlay.pth"
        shutil.copy(start, sysconfig.get_paths()["purelib"])
    os.execvpe(command[0], command, env)


if __name__ == "__main__":
    main(sys.argv[1:])
