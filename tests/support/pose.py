"""A package that poses as vLLM, with a serve parser that is small enough to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_overlay import infocache
from vllm_overlay.upstream import Tree

POSE = {
    "vllm/__init__.py": """
import os
print("noise on standard output")
with open(os.environ["POSE_LOG"], "a") as log:
    log.write(os.environ.get("VLLM_OVERLAY_PLAN", "no plan") + "\\n")
""",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/cli/__init__.py": "",
    "vllm/utils/__init__.py": "",
    "vllm/config.py": """
import dataclasses

@dataclasses.dataclass
class SpeculativeConfig:
    method: str = ""
    num_speculative_tokens: int = 0
    __pydantic_config__ = {"extra": "forbid"}
""",
    "vllm/utils/argparse_utils.py": """
import argparse

class FlexibleArgumentParser(argparse.ArgumentParser):
    pass

def human_readable_int(text):
    return int(text)
""",
    "vllm/entrypoints/cli/serve.py": """
import argparse, dataclasses, json
from vllm.utils.argparse_utils import human_readable_int

@dataclasses.dataclass
class Pass:
    fuse: bool = False
    __pydantic_config__ = {"extra": "forbid"}

@dataclasses.dataclass
class Compilation:
    mode: int = 0
    custom_ops: list = dataclasses.field(default_factory=list)
    pass_config: Pass | None = None
    free: dict = dataclasses.field(default_factory=dict)
    __pydantic_config__ = {"extra": "forbid"}

def parse_dataclass(text, cls=Compilation):
    return cls(**json.loads(text))

class Serve:
    def subparser_init(self, subparsers):
        add = (p := subparsers.add_parser("serve")).add_argument
        add("model_tag", nargs="?")
        add("--headless", action="store_true")
        add("--enable-x", action=argparse.BooleanOptionalAction, default=True)
        add("--tensor-parallel-size", "-tp", type=int)
        add("--gpu-memory", "--device-memory", dest="gpu_memory", type=float)
        add("--dtype", type=str, choices=["auto", "bfloat16", "float16"])
        add("--max-model-len", type=human_readable_int)
        add("--served-model-name", nargs="+", type=str)
        add("--sizes", nargs=2, type=int)
        add("--middleware", action="append", type=str)
        add("--hf-token", nargs="?", const=True, type=str)
        add("--token", nargs="?", const=True, type=str)
        add("--optimization-level")
        add("--backend", type=lambda s: s.lower().replace("-", "_"), choices=["a_b"])
        add("--compilation-config", "-cc", type=parse_dataclass)
        add("--speculative-config", type=json.loads)
        add("--allowed-origins", type=json.loads)
        add("--api-key", nargs="+")
        add("--config")
        add("--model")
        add("--port", type=int)
        return p

    def validate(self, args):
        if args.headless and args.port:
            raise ValueError("headless\\nhas no port")

def cmd_init():
    return [Serve()]
""",
}


class Pose:
    """A package that poses as vLLM, found through PYTHONPATH, and how often it was imported."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "site"
        self.home = folder / "home"
        self.log = folder / "log"
        for name, text in POSE.items():
            file = self.root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        self.tree = Tree(self.root, "0.1.0")

    @property
    def imports(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def pose(folder: Path, patch: pytest.MonkeyPatch) -> Pose:
    made = Pose(folder)
    patch.setenv("PYTHONPATH", str(made.root))
    patch.setenv("POSE_LOG", str(made.log))
    infocache.tree_identity.cache_clear()
    return made
