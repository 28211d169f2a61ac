"""vLLM trees that need not be installed: a release, a wheel or a folder. Only Python is kept."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

from vllm_overlay.errors import ConfigError
from vllm_overlay.upstream import Tree, installed_tree, open_tree

CACHE = "info"  # the folder of the state folder that holds digests
MAX_PYTHON = 512 << 20  # bytes of Python in one wheel; vLLM 0.33.0 has 42 MB
# Releases ship for x86-64 only under one of these tags; which one has changed over time.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)]


def find_tree(spec: str | None, home: Path) -> Tree:
    """Return the vLLM that ``spec`` names: a release number, a wheel, a folder, or the installed
    one for None. ``home`` is the state folder, where what was fetched or unpacked is kept.

    Raises ConfigError if there is none or it cannot be fetched.
    """
    cache = home / CACHE
    if spec is None:
        return installed_tree(cache)
    path = Path(spec).expanduser()
    if path.is_dir():
        return open_tree(path.resolve(), cache)
    if path.suffix == ".whl":
        return open_tree(_unpacked_wheel(path, home), cache)
    try:
        version = str(Version(spec))
    except InvalidVersion:
        raise ConfigError(
            "no such vLLM", found=spec, expected="a release number, a wheel or a folder"
        ) from None
    root = home / "releases" / version
    if not root.is_dir():
        _fetch(version, root)
    tree = open_tree(root, cache)
    if Version(tree.version) != Version(version):
        raise ConfigError(
            "a kept release is another one", file=root, found=tree.version, expected=version,
            remedy=f"remove {root}",
        )  # fmt: skip
    return tree


def _fetch(version: str, root: Path) -> None:
    """Fetch the wheel of a release with pip and keep its Python files in ``root``."""
    with _scratch(root) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
        command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
        command += [option for tag in PLATFORMS for option in ("--platform", tag)]
        command += ["--dest", scratch, f"vllm=={version}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            errors = [line for line in result.stderr.splitlines() if "ERROR" in line]
            said = (errors or result.stderr.splitlines() or ["nothing"])[-1].strip()
            raise ConfigError(
                f"vLLM {version} cannot be fetched", found=f"pip said: {said}",
                remedy="give a wheel or an unpacked folder of that release instead",
            )  # fmt: skip
        _unpack(wheels[0], root)


def _unpacked_wheel(wheel: Path, home: Path) -> Path:
    try:
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"the wheel cannot be read: {error.strerror}", file=wheel) from None
    root = home / "releases" / f"wheel-{digest[:16]}"
    if not root.is_dir():
        _unpack(wheel, root)
    return root


def _unpack(wheel: Path, root: Path) -> None:
    """Put the Python files of ``wheel`` into ``root``, whole or not at all."""
    with _scratch(root) as scratch:
        target = Path(scratch, "tree")
        try:
            with zipfile.ZipFile(wheel) as archive:
                _extract(archive, target)
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            raise ConfigError(f"no sound wheel: {error}", file=wheel) from None
        if not (target / "vllm" / "__init__.py").is_file():
            raise ConfigError("the wheel holds no vLLM", file=wheel)
        try:
            target.rename(root)
        except OSError:
            if not root.is_dir():  # else another process was faster; its copy is as good
                raise


def _extract(archive: zipfile.ZipFile, target: Path) -> None:
    size = 0
    for info in archive.infolist():
        path = PurePosixPath(info.filename)
        if path.parts[:1] != ("vllm",) or path.suffix != ".py" or ".." in path.parts:
            continue
        size += info.file_size
        if size > MAX_PYTHON:
            raise ConfigError("the wheel holds too much Python", file=archive.filename)
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(info) as source, file.open("wb") as out:
            shutil.copyfileobj(source, out)


def _scratch(root: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a folder on the file system of ``root``, so that a rename can be atomic."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}.")
    except OSError as error:
        raise ConfigError(
            f"the state folder cannot be written: {error.strerror}", file=root.parent
        ) from None
