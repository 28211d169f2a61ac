"""The other Pythons on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MINORS = range(11, 15)


def pythons() -> list[Path]:
    """Return this Python and one of each other version that there is and that runs."""
    found = [Path(sys.executable)]
    for minor in MINORS:
        if minor == sys.version_info.minor:
            continue
        name = f"python3.{minor}"
        folders = [*Path.home().glob(f".pyenv/versions/3.{minor}.*/bin"), Path("/usr/local/bin"),
                   Path("/usr/bin")]  # fmt: skip
        here = [f / name for f in folders if (f / name).is_file() and runs(f / name)]
        found += here[:1]
    return found


def runs(python: Path) -> bool:
    return subprocess.run([python, "-c", "import sys"], capture_output=True).returncode == 0
