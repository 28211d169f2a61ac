"""Compiles step.cu into the library that native.py loads. Standard library only.

``python -m vllm_overlay.kda.build --arch 90,100`` writes ``kda_step.so`` and ``kda_step.json``
beside step.cu, the one place where they are looked for, or into ``--out``. The library has machine
code (SASS) for each architecture and PTX for the highest, from which a driver compiles for later
GPUs. It links the CUDA runtime statically, so neither torch nor its version matters. The same
source, nvcc, host compiler and architectures give the same bytes in any folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vllm_overlay.errors import ConfigError, UsageError
from vllm_overlay.kda.files import FLAGS, FOLDER, LIBRARY, MANIFEST, SOURCE, digest, sources

VERSION = re.compile(r"\bV(\d+(?:\.\d+)+)")
ERROR = re.compile(r"\b(error|fatal)\b", re.I)


def build(source: Path, architectures: Sequence[int], out: Path) -> Path:
    """Compile ``source`` for GPUs such as 90 (compute capability 9.0); return the library's path.

    An older library in ``out`` stays as it is until the new one is whole. Raises UsageError for an
    architecture that nvcc does not know, ConfigError for all else that stands in the way.
    """
    nvcc = _nvcc()
    known = sorted(int(name) for name in re.findall(r"sm_(\d+)\b", _run(nvcc, "--list-gpu-code")))
    for arch in architectures:
        if arch not in known:
            raise UsageError(
                "nvcc does not know an architecture of --arch",
                found=arch,
                expected=f"some of {', '.join(map(str, known))}",
            )
    version = VERSION.search(_run(nvcc, "--version"))
    try:
        parts = sources(source.parent)
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".kda-") as scratch:
            made = _compile(nvcc, source, parts, architectures, Path(scratch))
            manifest = {
                "schema": 1,
                "source": digest(parts),
                "library": hashlib.sha256(made.read_bytes()).hexdigest(),
                "architectures": sorted(architectures),
                "nvcc": version[1] if version else "unknown",
            }
            written = made.with_name(MANIFEST)
            written.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            for file in (made, written):  # between the two, the old manifest refuses the library
                file.chmod(0o644)  # whoever builds, another user serves
                file.replace(out / file.name)
    except OSError as error:
        raise ConfigError(
            "the CUDA library cannot be written",
            file=error.filename or out,
            found=error.strerror,
            expected="a writable folder with free space, and the sources",
            remedy="name another folder with --out",
        ) from None
    return out / LIBRARY


def _nvcc() -> str:
    found = shutil.which("nvcc")
    if found is None:
        raise ConfigError(
            "the CUDA library needs a compiler",
            found="no nvcc on PATH",
            expected="nvcc of the CUDA toolkit",
            remedy="install it; or build the image with KDA_ARCHS= for none, and Triton is used",
        )
    return found


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run", found=error.strerror) from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise ConfigError(f"{' '.join(command)} ended with {done.returncode}", found=said[-1])
    return done.stdout


def _compile(
    nvcc: str,
    source: Path,
    parts: dict[str, bytes],
    architectures: Sequence[int],
    scratch: Path,
) -> Path:
    """Return the library, made in ``scratch``: no path of this machine gets into it."""
    for name, code in parts.items():
        (scratch / name).write_bytes(code)
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in sorted(architectures)]
    highest = max(architectures)
    targets.append(f"-gencode=arch=compute_{highest},code=compute_{highest}")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NVCC_")}
    done = subprocess.run(
        [nvcc, *FLAGS, *targets, "-o", LIBRARY, SOURCE],
        cwd=scratch,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode or not (scratch / LIBRARY).is_file():
        lines = done.stdout.strip().splitlines() or [f"nothing, and status {done.returncode}"]
        at = next((i for i, line in enumerate(lines) if ERROR.search(line)), len(lines) - 1)
        place = re.match(r"([\w.]+\.cuh?)\((\d+)\)", lines[at])
        raise ConfigError(
            "the CUDA library does not compile",
            file=source.with_name(place[1]) if place else source,
            line=int(place[2]) if place else None,
            found=f"line {at + 1} of {len(lines)} of nvcc's output: {lines[at].strip()}",
        )
    return scratch / LIBRARY


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy="--help shows the arguments")


def _architectures(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{2,3}", word) for word in words):
        expected = "compute capabilities without their dot, such as 90,100"
        raise UsageError("--arch names no architectures", found=repr(text), expected=expected)
    return sorted({int(word) for word in words})


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, say what was built, and return the exit status."""
    parser = _Parser(prog="python -m vllm_overlay.kda.build", description="Compile kda_step.so.")
    parser.add_argument("--arch", required=True, help="the GPUs, such as 90,100")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder; the package's own")
    try:
        given = parser.parse_args(arguments)
        made = build(FOLDER / SOURCE, _architectures(given.arch), given.out)
    except ConfigError as error:
        print(f"vllm-overlay: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{made}: {(made.with_name(MANIFEST)).read_text(encoding='utf-8').strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
