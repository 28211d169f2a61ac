"""The build of the CUDA library: what it refuses with a made-up nvcc, what a real one makes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vllm_overlay.activate.planfile import sha256
from vllm_overlay.kda import build, native
from vllm_overlay.kda.files import FOLDER, LIBRARY, MANIFEST, SOURCE, Built, digest, sources

ROOT = Path(__file__).resolve().parents[2]
FAKE = """#!/bin/sh
case "$1" in
  --list-gpu-code) printf 'sm_80\\nsm_90\\nsm_100\\n'; exit ;;
  --version) echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit ;;
esac
env >"$FAKE_ENV"
printf '%s\\n' "$@" >"$FAKE_ENV.args"
"""
real = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that only says that it ended; a test appends what it does."""
    file = tmp_path / "bin" / "nvcc"
    file.parent.mkdir()
    file.write_text(FAKE)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_ENV", str(tmp_path / "env"))
    return file


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return exit status and the one line of a build that is refused."""
    status = build.main(arguments)
    out, line = capsys.readouterr()
    assert out == "" and line.count("\n") == 1 and line.startswith("vllm-overlay: ")
    return status, line


def test_without_nvcc_the_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, line = refused(capsys, "--arch", "90", "--out", str(tmp_path))
    assert status == 78 and "no nvcc on PATH" in line and "KDA_ARCHS=" in line


@pytest.mark.parametrize(
    ("arch", "says"),
    [
        ("90,42", "does not know an architecture of --arch; found 42; expected some of 80, 90"),
        ("9.0", "--arch names no architectures; found '9.0'"),
        ("", "--arch names no architectures; found ''"),
        ("90,", "--arch names no architectures"),
        ("sm_90", "such as 90,100"),
    ],
)
def test_an_architecture_that_is_none_is_wrong_usage(
    nvcc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arch: str, says: str
) -> None:
    status, line = refused(capsys, "--arch", arch, "--out", str(tmp_path / "out"))
    assert status == 2 and says in line
    assert not (tmp_path / "out").exists()


def test_wrong_arguments_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, line = refused(capsys)
    assert status == 2 and "--arch" in line
    status, line = refused(capsys, "--arch", "90", "--ouch", "x")
    assert status == 2 and "--ouch" in line


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("note\\nstep.cu(12): error: no x\\n2 errors\\n",
         f"{FOLDER}/{SOURCE}:12: the CUDA library does not compile; found line 2 of 3 of nvcc's "
         "output: step.cu(12): error: no x"),
        ("ptxas fatal   : too much shared data\\n", "line 1 of 1 of nvcc's output: ptxas fatal"),
        ("it broke\\nfor no reason\\n", "line 2 of 2 of nvcc's output: for no reason"),
        ("", "nothing, and status 3"),
    ],
)  # fmt: skip
def test_a_compile_error_is_told_and_leaves_the_old_library(
    nvcc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, says: str
) -> None:
    nvcc.write_text(f"{FAKE}printf '{output}' >&2\nexit 3\n")
    out = tmp_path / "out"
    out.mkdir()
    (out / LIBRARY).write_bytes(b"old")
    status, line = refused(capsys, "--arch", "90", "--out", str(out))
    assert status == 78 and says in line
    assert [file.name for file in out.iterdir()] == [LIBRARY]
    assert (out / LIBRARY).read_bytes() == b"old"


def test_a_compiler_that_makes_nothing_is_told(
    nvcc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, line = refused(capsys, "--arch", "90", "--out", str(tmp_path / "out"))
    assert status == 78 and "does not compile" in line and "nothing, and status 0" in line


def test_a_compiler_that_cannot_run_is_told(
    nvcc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvcc.write_text("#!/bin/sh\necho 'no licence' >&2\nexit 9\n")
    status, line = refused(capsys, "--arch", "90", "--out", str(tmp_path))
    assert status == 78 and "--list-gpu-code ended with 9; found no licence" in line


def test_a_folder_that_cannot_be_written_is_named(
    nvcc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("in the way")
    status, line = refused(capsys, "--arch", "90", "--out", str(tmp_path / "out"))
    assert status == 78 and f"{tmp_path}/out: the CUDA library cannot be written" in line
    status, line = refused(capsys, "--arch", "90", "--out", "/proc/self/nowhere")
    assert status == 78 and "/proc/self/nowhere: the CUDA library cannot be written" in line


def test_nvcc_is_asked_for_each_architecture_and_the_highest_s_ptx(
    nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc.write_text(f"{FAKE}echo made >{LIBRARY}\n")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O0")
    old = os.umask(0o077)
    try:
        assert build.main(["--arch", "100,90", "--out", str(tmp_path / "out")]) == 0
    finally:
        os.umask(old)
    said = (tmp_path / "env.args").read_text().splitlines()
    assert [word for word in said if word.startswith("-gencode")] == [
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]
    assert "NVCC_APPEND_FLAGS" not in (tmp_path / "env").read_text()
    assert json.loads((tmp_path / "out" / MANIFEST).read_text()) == {
        "schema": 1,
        "source": digest(sources(FOLDER)),
        "library": sha256(b"made\n"),
        "architectures": [90, 100],
        "nvcc": "13.0.88",
    }
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert modes == {LIBRARY: 0o644, MANIFEST: 0o644}  # root builds, another user serves


@real
def test_the_real_library_has_both_architectures_and_its_entries_only(tmp_path: Path) -> None:
    for name in ("one", "another folder"):
        shutil.copytree(FOLDER, tmp_path / name, ignore=shutil.ignore_patterns("kda_step.*"))
        with (tmp_path / name / SOURCE).open("a") as source:
            source.write("int kda_inner(void) { return 2; }\n")  # of nobody's business
        build.build(tmp_path / name / SOURCE, [90, 100], tmp_path / name)
    made = (tmp_path / "one" / LIBRARY).read_bytes()
    assert made == (tmp_path / "another folder" / LIBRARY).read_bytes()
    assert str(tmp_path).encode() not in made
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", tmp_path / "one" / LIBRARY], capture_output=True, text=True
    ).stdout
    assert set(re.findall(r" T (\w+)", symbols)) == {
        "kda_step_abi",
        "kda_step_error",
        "kda_step_launch",
        "kda_step_shared_bytes",
    }
    for capability, arch in {(9, 0): "sm_90", (10, 0): "sm_100", (12, 0): "compute_100"}.items():
        found = native.look(capability, tmp_path / "one")
        assert isinstance(found, native.Native), found
        assert (found.arch, found.handle.kda_step_abi()) == (arch, native.ABI)


@real
def test_a_real_compile_error_names_the_line(tmp_path: Path) -> None:
    (tmp_path / SOURCE).write_text("int x;\nint y = z;\n")
    with pytest.raises(build.ConfigError) as caught:
        build.build(tmp_path / SOURCE, [90], tmp_path / "out")
    assert str(caught.value).startswith(f"{tmp_path / SOURCE}:2: the CUDA library does not compile")
    assert 'identifier "z" is undefined' in str(caught.value)


@real
def test_an_installed_package_finds_what_its_own_build_made(tmp_path: Path) -> None:
    """As in the image: pip installs, the build has only --arch, another folder is not searched."""
    site = tmp_path / "site"
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([sys.executable, *install, "--target", site, ROOT], check=True)
    assert not list(site.glob("vllm_overlay/kda/kda_step.*"))
    steps = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from vllm_overlay.kda import build, native\n"
        "assert native.FOLDER.is_relative_to(sys.argv[1]), native.FOLDER\n"
        "assert build.main(['--arch', '90']) == 0; print(native.look((9, 0), native.FOLDER).path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", steps, site], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(site / "vllm_overlay/kda" / LIBRARY)


def test_the_image_s_architectures_serve_every_recipe() -> None:
    given = re.search(r"^ARG KDA_ARCHS=(.*)", (ROOT / "Dockerfile").read_text(), re.M)
    assert given
    built = Built(FOLDER / LIBRARY, "", tuple(build._architectures(given[1])))
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        requires = yaml.safe_load(file.read_text()).get("requires") or {}
        needed = requires.get("compute-capability", "")
        for major, minor in re.findall(r"(\d+)\.(\d+)", needed):
            assert built.code_for((int(major), int(minor))).startswith("sm_"), file
