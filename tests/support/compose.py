"""Runs the compose files from a copy of the checkout's, as a project of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.serving import free_port
from vllm_overlay.folders import home_folder

ROOT = Path(__file__).resolve().parents[2]
# Where an engine has no registry, its base image is imported under this name.
LOCAL_BASE = "local/debian:bookworm"
# What the compose files take from the caller; a test must not depend on the caller's.
KNOBS = (
    "RECIPE",
    "VARIANT",
    "PORT",
    "IMAGE",
    "MODELS_DIR",
    "SHM_SIZE",
    "NODE_RANK",
    "HEAD_ADDR",
    "RESTART",
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
)


@dataclass(frozen=True)
class Node:
    """One compose project on a checkout of its own; its recipes and fixes may be changed."""

    checkout: Path
    env: Mapping[str, str]
    cpu: bool = True
    more: tuple[str, ...] = ()  # further compose files, which come last

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.env['PORT']}"

    def compose(
        self, *arguments: str, check: bool = True, timeout: float = 600, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker compose`; ``env`` is what the caller sets for this one call."""
        files = ["serve.yaml", *(["cpu.yaml"] if self.cpu else []), *self.more]
        chosen = [word for name in files for word in ("-f", str(self.checkout / "compose" / name))]
        done = subprocess.run(
            ["docker", "compose", *chosen, *arguments],
            env=environment({**self.env, **env}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, self.told(done)
        return done

    def told(self, done: subprocess.CompletedProcess[str]) -> str:
        """Return what a failed command and the server have to say."""
        logs = self.compose("logs", "--tail", "60", check=False, RECIPE="any").stdout
        return f"{done.args} ended with {done.returncode}\n{done.stdout}{done.stderr}\n{logs}"

    def up(self, recipe: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.compose("up", "--wait", "--no-build", *arguments, RECIPE=recipe)

    def shell(self, script: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a script in the serving container."""
        return self.exec("sh", "-c", script, check=check)

    def exec(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.compose("exec", "-T", "serve", *command, check=check, RECIPE="any")

    def container(self) -> str:
        """Return the id of the project's container, running or not."""
        return self.compose("ps", "-aq", "serve", RECIPE="any").stdout.strip()

    def inspect(self, template: str) -> str:
        return docker("inspect", "--format", template, self.container())


def node(checkout: Path, project: str, image: str, models: Path | None = None) -> Node:
    """Copy what the compose files need into ``checkout`` and return a node of it."""
    for name in ("compose", "recipes", "fixes"):
        shutil.copytree(
            ROOT / name, checkout / name, ignore=shutil.ignore_patterns(".env", "__pycache__")
        )
    env = {
        "COMPOSE_PROJECT_NAME": project,
        "IMAGE": image,
        "MODELS_DIR": str(models or home_folder(os.environ) / "models"),
        "PORT": str(free_port()),
    }
    return Node(checkout, env)


NETWORK = """\
services:
  serve:
    hostname: {name}
    network_mode: !reset null
    networks: {{boxes: {{aliases: [{name}]}}}}
    volumes: [{{type: bind, source: "{facts}", target: /var/lib/vllm-overlay/info}}]
networks:
  boxes: {{name: {network}, external: true}}
"""


def boxes(
    folder: Path, network: str, image: str, count: int, facts: Path, **env: str
) -> list[Node]:
    """Return nodes as on boxes of their own: a checkout, a state and a NODE_RANK each.

    What they find out about vLLM, which is one for all, they keep in ``facts``.

    Boxes have networks of their own, and the compose file takes the host's; here each is a
    container on one network of Docker's.
    """
    found = []
    for rank in range(count):
        name = f"box-{rank}"
        made = node(folder / name, f"{network}-{rank}", image)
        more = {"NODE_RANK": str(rank), "HEAD_ADDR": "box-0", "SHM_SIZE": "1gb", **env}
        (made.checkout / "compose" / "network.yaml").write_text(
            NETWORK.format(name=name, network=network, facts=facts)
        )
        files = ("cluster.yaml", "network.yaml")
        found.append(Node(made.checkout, {**made.env, **more}, more=files))
    return found


def environment(env: Mapping[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in KNOBS and not k.startswith("VLLM_")}
    return {**kept, **env}


def docker(*arguments: str, timeout: float = 120, stdin: str = "") -> str:
    done = subprocess.run(
        ["docker", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{done.args}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def build_cpu(image: str) -> None:
    """Build the cpu target of this checkout, through the compose files. Minutes at first."""
    env = {"IMAGE": image, "RECIPE": "any"}
    if "CPU_BASE" not in os.environ and has_image(LOCAL_BASE):
        env["CPU_BASE"] = LOCAL_BASE
    if not os.environ.get("WHEELS_DIR") and not os.environ.get("TORCH_INDEX"):
        env["WHEELS_DIR"] = str(torch_wheel())
    Node(ROOT, env).compose("build", timeout=1500)


def has_image(name: str) -> bool:
    done = subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False)
    return done.returncode == 0


def torch_wheel() -> Path:
    """Return the folder of torch's CPU wheel, fetched with this Python's pip if need be."""
    version = re.search(r"^ARG TORCH_VERSION=(.*)", (ROOT / "Dockerfile").read_text(), re.M)
    assert version
    folder = home_folder(os.environ) / "wheels" / f"torch-{version[1]}"
    if not list(folder.glob("torch-*.whl")):
        fetch = ["download", "--quiet", "--no-deps", "--dest", str(folder), f"torch=={version[1]}"]
        subprocess.run([sys.executable, "-m", "pip", *fetch], check=True)
    return folder
