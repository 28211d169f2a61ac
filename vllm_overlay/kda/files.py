"""Where the CUDA library lies, and whether what lies there is to be trusted. No torch.

One place for each installation: beside step.cu in the package. A path in the environment, or a
folder that anybody may write, would let them put their code into the server.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCE, LIBRARY, MANIFEST = "step.cu", "kda_step.so", "kda_step.json"
# -ftz: a denormal is far below what a state keeps, and handling it costs time (bench/NOTES.md).
FLAGS = (
    *("-O3", "-std=c++17", "-ftz=true", "-shared", "-cudart=static", "-frandom-seed=kda"),
    *("-Xcompiler=-fPIC,-fvisibility=hidden", "-Xlinker=-s,--exclude-libs,ALL"),
)


def sources(folder: Path) -> dict[str, bytes]:
    """Return what the library is compiled from, by name: ``SOURCE``, then its headers beside it.

    Raises OSError.
    """
    headers = sorted(path.name for path in folder.glob("*.cuh"))
    return {name: (folder / name).read_bytes() for name in (SOURCE, *headers)}


def digest(parts: dict[str, bytes]) -> str:
    """Return one sha256 of all sources, their names, and how they are compiled."""
    lines = [f"{hashlib.sha256(code).hexdigest()} {name}" for name, code in parts.items()]
    return hashlib.sha256("\n".join([*lines, *FLAGS]).encode()).hexdigest()


class NoLibrary(Exception):
    """Why there is no library to use; ``str()`` is one line."""


@dataclass(frozen=True)
class Built:
    """A library as its manifest describes it, with both digests checked."""

    path: Path
    sha256: str
    architectures: tuple[int, ...]  # 90 for compute capability 9.0; PTX for the last

    def code_for(self, capability: tuple[int, int]) -> str:
        """Return the code that a GPU runs: sm_NN, or compute_NN where its driver compiles PTX.

        Machine code runs on its own compute capability and on later ones of the same major number;
        PTX on all later ones (CUDA C++ Programming Guide, "Compute Capabilities"). Raises
        NoLibrary.
        """
        major, minor = capability
        same = [a for a in self.architectures if a // 10 == major and a % 10 <= minor]
        if same:
            return f"sm_{same[-1]}"
        highest = self.architectures[-1]
        if divmod(highest, 10) < capability:
            return f"compute_{highest}"
        has = ", ".join(f"sm_{arch}" for arch in self.architectures)
        place = self.path.parent
        raise NoLibrary(f"no CUDA library for sm_{major}{minor} in {place}: it has {has}")


def read(folder: Path) -> Built:
    """Return the library of a folder. Raises NoLibrary if there is none to be trusted."""
    library, manifest = folder / LIBRARY, folder / MANIFEST
    if not library.exists():
        raise NoLibrary(f"no CUDA library in {folder}")
    for path in (folder, library, manifest):
        _check_owner(path)
    try:
        said = json.loads(manifest.read_bytes())
        architectures = tuple(sorted(int(arch) for arch in said["architectures"]))
        wanted, made_of = str(said["library"]), str(said["source"])
        if said["schema"] != 1 or not architectures:
            raise ValueError("it is of another schema, or names no architecture")
        found = hashlib.sha256(library.read_bytes()).hexdigest()
        source = digest(sources(folder))
    except OSError as error:
        raise NoLibrary(f"{error.filename or folder} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise NoLibrary(f"{manifest} cannot be used: {type(error).__name__}: {error}") from None
    if found != wanted:
        raise NoLibrary(f"{library} is not the one that {MANIFEST} describes: build it again")
    if source != made_of:
        raise NoLibrary(f"{library} was built from another {SOURCE}: build it again")
    return Built(library, wanted, architectures)


def _check_owner(path: Path) -> None:
    """Raise NoLibrary for what others may change: it would run in the server.

    Whoever owns this package may change this very line, so is trusted with the library too.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise NoLibrary(f"{path} cannot be read: {error.strerror}") from None
    if found.st_mode & stat.S_IWOTH:
        raise NoLibrary(f"{path} may be written by anybody: chmod o-w it")
    if found.st_uid not in (0, os.geteuid(), Path(__file__).stat().st_uid):
        raise NoLibrary(f"{path} belongs to user {found.st_uid}, who owns no part of this program")
