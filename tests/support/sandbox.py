"""A small Python environment with a made-up vLLM, for what activation does in any process.

The real vLLM is patched in tests/upstream and tests/engine; here each rule gets a module that
shows it alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_overlay.activate.planfile import sha256
from vllm_overlay.plan import Plan, PlannedFix, write_plan

REPO = Path(__file__).resolve().parents[2]
VERSION = "9.9.0"
MODULES = {
    "vllm/__init__.py": "",
    "vllm/envs.py": "environment_variables = {'VLLM_PORT': lambda: None}\n",
    "vllm/sampler.py": "GREETING = 'stock'\n\n\ndef greet():\n    return GREETING\n",
    "vllm/user.py": "from vllm.sampler import greet\n",
    "vllm/pack/__init__.py": "from vllm.pack.inner import VALUE\n",
    "vllm/pack/inner.py": "VALUE = 1\n",
    "vllm/swallow.py": (
        "try:\n    import vllm.sampler\nexcept Exception:\n    pass\n"
        "try:\n    from vllm.sampler import nothing\nexcept ImportError:\n    pass\n"
    ),
}


@dataclass
class Sandbox:
    """A virtual environment (``layout`` site-packages or dist-packages) and a state folder."""

    root: Path
    site: Path
    home: Path
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    fixes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    after: dict[str, list[str]] = field(default_factory=dict)  # the fixes that one may build upon
    plan_path: Path | None = None

    @property
    def python(self) -> str:
        return str(self.root / "bin" / "python")

    def source(self, module: str) -> Path:
        stem = self.site / Path(*module.split("."))
        package = stem / "__init__.py"
        return package if package.is_file() else stem.with_suffix(".py")

    def edit(self, fix: str, module: str, old: str, new: str) -> None:
        """Plan an edit: ``old`` becomes ``new`` in the module's source."""
        original = self.source(module).read_text()
        assert original.count(old) == 1
        text = original.replace(old, new)
        entry = self._entry(module)
        address = sha256(f"{entry['original']}\n{sha256(text.encode())}".encode())
        path = self.home / "store" / address / entry["path"]
        path.parent.mkdir(parents=True)
        path.write_text(text)
        file = str(path.relative_to(self.home))
        entry["source"] = {"file": file, "sha256": sha256(text.encode())}
        self._step(fix, "edit", module, "x.diff")

    def hook(self, fix: str, module: str, code: str, function: str = "install") -> Path:
        """Plan a hook whose file holds ``code``."""
        file = self.root / "fixes" / fix / "hooks.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
        self._entry(module)
        self._step(fix, "hook", module, str(file), sha256(code.encode()), function)
        return file

    def added(self, fix: str, module: str, code: str, file: str = "new.py") -> Path:
        """Plan a new module in vLLM's namespace."""
        path = self.root / "fixes" / fix / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        self.modules[module] = {
            "path": None,
            "original": None,
            "package": path.name == "__init__.py",
            "source": {"file": str(path), "sha256": sha256(code.encode())},
            "fixes": [],
        }
        self._step(fix, "module", module, str(path))
        return path

    def _entry(self, module: str) -> dict[str, Any]:
        path = self.source(module)
        return self.modules.setdefault(
            module,
            {
                "path": str(path.relative_to(self.site)),
                "original": sha256(path.read_bytes()),
                "package": path.name == "__init__.py",
                "source": None,
                "fixes": [],
            },
        )

    def _step(
        self,
        fix: str,
        kind: str,
        module: str,
        file: str,
        digest: str = "",
        function: str | None = None,
    ) -> None:
        step: dict[str, Any] = {
            "fix": fix,
            "kind": kind,
            "file": file,
            "sha256": digest,
            "function": function,
        }
        step["after"] = self.after.get(fix, [])
        self.modules[module]["fixes"].append(step)
        self.fixes.setdefault(fix, []).append({"kind": kind, "module": module, "symbols": []})

    def write(self) -> Path:
        """Write the plan and return its path."""
        plan = Plan(
            cache_key="0123456789abcdef",
            recipe={"name": "test", "file": "test.yaml", "variant": None},
            folders={},
            vllm={"version": VERSION, "path": str(self.site / "vllm"), "torch": "none"},
            model="m",
            served_model="m",
            serve={},
            env={},
            fixes=tuple(
                PlannedFix(
                    name,
                    "apply",
                    "VLLM_" + name.upper().replace("-", "_"),
                    "1",
                    "recipe",
                    (),
                    tuple(targets),
                    "0",
                )
                for name, targets in self.fixes.items()
            ),
            overrides=(),
            requires={},
            smoke={},
            modules=self.modules,
        )
        self.plan_path = write_plan(plan, self.home)
        return self.plan_path

    def run(
        self,
        *arguments: str,
        plan: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python with the arguments, the plan in its environment."""
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.root), **(env or {})}
        if plan:
            path = self.plan_path or self.write()
            environment["VLLM_OVERLAY_PLAN"] = str(path)
        return subprocess.run(
            [self.python, *arguments],
            env=environment,
            cwd=cwd or self.root,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def code(self, source: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run ``python -c source``."""
        return self.run("-c", source, **options)

    def receipts(self) -> list[dict[str, Any]]:
        """Return the receipts that this plan's processes wrote."""
        assert self.plan_path is not None
        files = sorted((self.plan_path.parent / "receipts").glob("*.json"))
        return [json.loads(file.read_text()) for file in files]


def make_sandbox(root: Path, layout: str = "site-packages") -> Sandbox:
    """Make an environment with the overlay, the made-up vLLM, and what both need."""
    venv.create(root, symlinks=True, with_pip=False)
    (site,) = root.glob("lib/python*/site-packages")
    # The overlay and the libraries of the Python that runs the tests.
    libraries = [path for path in sys.path if path.endswith("-packages")]
    (site / "a_paths.pth").write_text("\n".join([str(REPO), *libraries]) + "\n")
    pth = REPO / "vllm_overlay" / "activate" / "vllm_overlay.pth"
    (site / "vllm_overlay.pth").write_text(pth.read_text())
    place = site
    if layout != "site-packages":  # Debian's own layout, reached by a path file
        place = root / "lib" / layout
        place.mkdir()
        (site / "a_layout.pth").write_text(f"{place}\n")
    for name, text in MODULES.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sandbox(root, place, root / "state")
