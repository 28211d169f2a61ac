"""Tells the head that this node cannot come, and why, so that it does not wait for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from vllm_overlay.activate.statement import PATIENCE, facts
from vllm_overlay.errors import ConfigError, ConfigErrors
from vllm_overlay.folders import FOLDER_VARIABLES, home_folder
from vllm_overlay.nodes import RANK, head_of, uses_ray
from vllm_overlay.resolve import Resolution, torch_version
from vllm_overlay.upstream import installed_tree


def tell_head(
    errors: Sequence[ConfigError], resolution: Resolution | None, environ: Mapping[str, str]
) -> None:
    """Leave word with the head that this node is refused; ``resolution`` as far as it came.

    Does nothing where this machine is the head, or no node at all.
    """
    rank = environ.get(RANK, "")
    if not rank.isdecimal() or int(rank) == 0:
        return
    serve = resolution.plan.serve if resolution else {}
    try:
        host, port = head_of(environ, serve)
    except ConfigError:
        return
    if uses_ray(serve):
        return
    print(f"vllm-overlay: telling the head at {host}:{port}", file=sys.stderr, flush=True)
    word = {
        "host": host,
        "port": port,
        "node": int(rank),
        "line": str(errors[0]),
        "facts": _facts(resolution, environ),
        "patience": PATIENCE,
    }
    subprocess.run(
        [sys.executable, "-m", "vllm_overlay.tell"], input=json.dumps(word).encode(), check=False
    )


def _facts(resolution: Resolution | None, environ: Mapping[str, str]) -> dict[str, str]:
    if resolution is not None:
        plan = resolution.plan
        kept = {name: value for name, value in environ.items() if name not in FOLDER_VARIABLES}
        return facts(plan.body(), {**kept, **plan.env})
    try:
        version = installed_tree(home_folder(environ) / "info").version
    except (ConfigError, ConfigErrors):
        return {}
    return {"vllm.version": version, "vllm.torch": torch_version()}


def main() -> None:
    """Read one word as JSON from standard input and leave it with the head."""
    from vllm_overlay.activate.gate import tell

    word = json.load(sys.stdin)
    if "host" not in word:
        word["host"], word["port"] = head_of(os.environ, {})
    sys.exit(0 if tell(**word) else 1)


if __name__ == "__main__":
    main()
