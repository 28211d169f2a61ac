"""Ray, apart from the environment of the tests: vLLM must not find it by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.serving import free_port
from vllm_overlay.activate.planfile import sha256
from vllm_overlay.folders import home_folder

LOCK = Path(__file__).resolve().parents[2] / "requirements-ray.lock"


def ray_folder() -> Path:
    """Return a folder with the pinned Ray, fetched once a machine."""
    folder = home_folder(os.environ) / f"ray-{sha256(LOCK.read_bytes())[:12]}"
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        hashed = ["--require-hashes", "--only-binary", ":all:", "-r", str(LOCK)]
        subprocess.run([*pip, "--target", str(part), *hashed], check=True)
        part.rename(folder)
    return folder


def with_ray(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Ray is found, without its telemetry and its token."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return {**env, **quiet, "PYTHONPATH": str(ray_folder())}


@contextmanager
def cluster(env: Mapping[str, str]) -> Iterator[str]:
    """Run a Ray of one node on the loopback, with its environment; yield its address."""
    port = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    options = ["--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=1"]
    more = ["--include-dashboard=false", f"--object-store-memory={80 * 2**20}"]
    with subprocess.Popen(
        [*command, *options, *more],
        env=with_ray(env),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as head:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            head.wait(60)
