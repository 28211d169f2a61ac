"""Make the environment of this checkout, or find the one made before, and print its folder.

Run by the Makefile with the system's Python 3.11; standard library only. Progress and errors go to
standard error. Two folders under ``$VLLM_OVERLAY_HOME/envs``:

``cpu-<key>``             the packages of requirements-dev.lock and torch's CPU build; the key is of
                          the lock, torch and the interpreter. Minutes to make.
``cpu-<key>-<checkout>``  hard links to its files, and this checkout installed into it: several
                          checkouts never see each other's code. Seconds to make.

A folder counts only once its last file, ``complete``, is there: a half-made one is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from name_vllm import name_vllm

CHECKOUT = Path(__file__).resolve().parent.parent
LOCK = CHECKOUT / "requirements-dev.lock"
KERNELS_LOCK = CHECKOUT / "requirements-kernels.lock"
TORCH = "torch==2.13.0+cpu"  # the local version keeps pip from taking the CUDA build of it
PYTHON = (3, 11)  # the lock was made for it


class Refused(Exception):
    """One line that says what is missing on this machine and what to do."""


def main() -> int:
    try:
        check_python()
        print(environment(home() / "envs", os.environ.get("TORCH_INDEX", "")))
    except Refused as error:
        say(f"make: {error}")
        return 1
    return 0


def home() -> Path:
    """Return the state folder, found as ``vllm_overlay.folders.home_folder`` finds it."""
    named = os.environ.get("VLLM_OVERLAY_HOME")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named).absolute() if named else Path(caches) / "vllm-overlay"


def check_python() -> None:
    if sys.version_info[:2] != PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        raise Refused(f"Python 3.11 is needed; found {found}; name one with `make PYTHON=/path …`")
    if importlib.util.find_spec("ensurepip") is None:
        raise Refused("this Python has no ensurepip; on Debian: apt-get install python3-venv")


def environment(envs: Path, torch_index: str) -> Path:
    """Return the environment of this checkout under ``envs``, made if need be."""
    base = envs / f"cpu-{base_key()}"
    env = envs / f"{base.name}-{digest(str(CHECKOUT).encode())[:8]}"
    wanted = checkout_state()
    if complete(env) == wanted:
        return env
    with locked(envs):
        if complete(base) is None:
            make_base(base, torch_index)
        if complete(env) is None:
            link(base, env)
        if complete(env) != wanted:
            install_checkout(env)
            (env / "complete").write_text(wanted)
    return env


def base_key() -> str:
    locks = LOCK.read_bytes() + KERNELS_LOCK.read_bytes()
    parts = (locks, TORCH.encode(), sys.version.encode(), sys.executable.encode())
    return digest(b"\0".join(parts))[:12]


def checkout_state() -> str:
    """Return a digest of the files that an editable install copies instead of linking to them."""
    pth = CHECKOUT / "vllm_overlay" / "activate" / "vllm_overlay.pth"
    return digest((CHECKOUT / "pyproject.toml").read_bytes() + b"\0" + pth.read_bytes())


def complete(env: Path) -> str | None:
    try:
        return (env / "complete").read_text()
    except FileNotFoundError:
        return None


@contextmanager
def locked(envs: Path) -> Iterator[None]:
    envs.mkdir(parents=True, exist_ok=True)
    with (envs / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make is at the environments; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_base(base: Path, torch_index: str) -> None:
    say(f"making {base}: 0.8 GB to fetch and 3 GB on disk, once")
    discard(base)
    run("venv", [sys.executable, "-m", "venv", str(base)], base)
    pip = [str(base / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--no-input"]
    hashed = ["--require-hashes", "--only-binary", ":all:", "-r"]
    run("packages", [*pip, *hashed, str(LOCK)], base)
    # Apart: only the kernel tests may find it, vLLM on the CPU must not.
    apart = ["--target", str(base / "opt" / "kernels")]
    run("kernels", [*pip, *apart, *hashed, str(KERNELS_LOCK)], base)
    index = ["--index-url", torch_index] if torch_index else []
    remedy = "; name an index that has it with `make TORCH_INDEX=URL …`"
    run("torch", [*pip, *index, TORCH], base, remedy)
    name_vllm(site_packages(base))
    (base / "complete").write_text("")


def link(base: Path, env: Path) -> None:
    """Copy ``base`` to ``env`` by hard links; what names its own folder is written anew."""
    discard(env)
    subprocess.run(["cp", "-al", str(base), str(env)], check=True)
    (env / "complete").unlink()
    for file in (env / "pyvenv.cfg", *(env / "bin").iterdir()):
        if file.is_symlink() or not file.is_file():
            continue
        content = file.read_bytes()
        if bytes(base) in content:
            mode = file.stat().st_mode
            file.unlink()
            file.write_bytes(content.replace(bytes(base), bytes(env)))
            file.chmod(mode)


def install_checkout(env: Path) -> None:
    (env / "complete").unlink(missing_ok=True)
    pip = [str(env / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--no-input"]
    run("this checkout", [*pip, "--no-build-isolation", "--editable", str(CHECKOUT)], env)


def run(what: str, command: Sequence[str], env: Path, remedy: str = "") -> None:
    """Run a step of the making with its last line on the terminal; its whole output goes to a log.

    Raises Refused with the end of the output if the step fails.
    """
    log = env.with_name(f"{env.name}.log")
    lines: list[str] = []
    with (
        log.open("a") as out,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=CHECKOUT
        ) as child,
    ):
        assert child.stdout
        for line in child.stdout:
            out.write(line)
            lines.append(line.rstrip())
            show(f"{what}: {line.strip()}")
    show("")
    if child.returncode:
        say("\n".join(lines[-25:]))
        raise Refused(f"{what}: exit status {child.returncode}; all of it: {log}{remedy}")


def show(line: str) -> None:
    """Replace the line at the cursor; elsewhere than on a terminal, nothing."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)


def discard(env: Path) -> None:
    if env.exists():
        shutil.rmtree(env)


def site_packages(env: Path) -> Path:
    return env / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
