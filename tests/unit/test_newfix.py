"""`new-fix`: git writes the diffs, and what the fix gives is what git gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import overlay
from tests.support.gitrepo import Repo
from tests.support.trees import VERSION, make_diff, make_tree
from tests.support.verdicts import BOTH, CORE, FIRST, SECOND
from vllm_overlay import difftext
from vllm_overlay.errors import ConfigError, ConfigErrors, UsageError
from vllm_overlay.fix import Fix, load_fix
from vllm_overlay.newfix import Made, new_fix
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import judge

FILES = {
    "v1/__init__.py": "",
    "v1/core.py": CORE,
    "v1/gone.py": "OLD = 1\nKEPT = 2\nMORE = 3\n",
    "v1/dos.py": "A = 1\r\nB = 2\r\nC = 3\r\n",
    "v1/endless.py": "A = 1\nB = 2",
    "envs.py": 'environment_variables = {"VLLM_PORT": None}\n',
}
OUTSIDE = {
    "tests/test_core.py": "assert True\n", "docs/a.md": "a\n", "README.md": "a\n",
    "csrc/a.cu": "a\n", "CMakeLists.txt": "a\n", "setup.py": "a\n", "requirements/cuda.txt": "a\n",
    "pyproject.toml": "a\n", ".buildkite/a.yaml": "a\n", "examples/a.py": "a\n",
    "benchmarks/a.py": "a\n", "vllm/config.json": "{}\n", "tools/install.sh": "a\n",
}  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return make_tree(tmp_path / "site", FILES)


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    files = {f"vllm/{name}": text for name, text in FILES.items()}
    return Repo(tmp_path / "repo", {"vllm/__init__.py": "", **files, **OUTSIDE})


def make(tmp_path: Path, diff: bytes, name: str = "mine") -> Made:
    file = tmp_path / "public.diff"
    file.write_bytes(diff)
    fixes = tmp_path / "fixes"
    fixes.mkdir(exist_ok=True)
    return new_fix(name, fixes, file, str(tmp_path / "site"), tmp_path / "home")


def made(tmp_path: Path, diff: bytes) -> tuple[Fix, Made]:
    result = make(tmp_path, diff)
    return load_fix(result.folder), result


def patched(fix: Fix, tree: Tree) -> dict[str, bytes]:
    (judged,) = judge([fix], tree)
    assert judged.verdict == "apply", judged.reasons
    return judged.patched


def refused(tmp_path: Path, diff: bytes) -> list[str]:
    """Return the reasons, after a look that nothing is left behind."""
    with pytest.raises((ConfigError, ConfigErrors)) as caught:
        make(tmp_path, diff)
    assert list((tmp_path / "fixes").iterdir()) == []
    assert caught.value.exit_code == 78
    return str(caught.value).split("\n")


# --- what becomes a fix ---


def test_changed_and_new_files_become_edits_and_modules(
    tmp_path: Path, tree: Tree, repo: Repo
) -> None:
    new = {"vllm/a/__init__.py": "", "vllm/a/b.py": "X = 'é'"}
    repo.write({"vllm/v1/core.py": FIRST, **new, "tests/test_core.py": "b\n", "docs/a.md": "b\n"})
    fix, result = made(tmp_path, repo.diff())
    assert patched(fix, tree) == {"vllm.v1.core": FIRST.encode()}
    modules = {name: file.read_text() for name, file in fix.modules.items()}
    assert modules == {"vllm.a": "", "vllm.a.b": "X = 'é'"}
    assert set(result.left_out) == {("tests/test_core.py", "tests"), ("docs/a.md", "docs")}
    assert fix.reviewed == {
        VERSION: {"vllm.v1.core": {"first": tree.symbols("vllm.v1.core")["first"]}}
    }
    assert (fix.vllm, fix.source) == (f"=={VERSION}", "public.diff")
    assert fix.flag and fix.flag.name == "VLLM_MINE"


def test_an_edit_keeps_the_hunks_as_they_came(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    repo.write({"vllm/v1/core.py": FIRST})
    diff = repo.diff("-U1")
    fix, _ = made(tmp_path, diff)
    hunks = diff[diff.index(b"@@") :]
    expected = b"--- a/vllm/v1/core.py\n+++ b/vllm/v1/core.py\n" + hunks
    assert fix.edits["vllm.v1.core"].read_bytes() == expected


def test_mails_are_applied_one_after_the_other(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    page = "https://github.com/vllm-project/vllm/pull/12"
    repo.write({"vllm/v1/core.py": FIRST, "vllm/v1/new.py": "X = 1\n", "vllm/v1/tmp.py": "T = 1\n"})
    subject = "[Bugfix] Zehn statt einem: größer, and a subject so long that git folds it in two"
    repo.commit(f"{subject}\n\n- see https://example.org/a\n- {page}.\n+ @ and --- in a message")
    repo.write({"vllm/v1/core.py": BOTH, "vllm/v1/new.py": "X = 2\n", "vllm/v1/tmp.py": None})
    repo.commit("Second")
    fix, _ = made(tmp_path, repo.mails())
    assert patched(fix, tree) == {"vllm.v1.core": BOTH.encode()}
    assert {name: file.read_text() for name, file in fix.modules.items()} == {
        "vllm.v1.new": "X = 2\n"
    }
    assert (fix.summary, fix.source) == (subject, page)


def test_a_copy_is_a_new_module(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    """A copy in git's sense: of the file as it was before the commit."""
    repo.write({"vllm/v1/core.py": FIRST, "vllm/v1/later.py": CORE})
    diff = repo.diff("-C", "--find-copies-harder")
    assert diff.index(b"+++ b/vllm/v1/core.py") < diff.index(b"copy from vllm/v1/core.py")
    fix, _ = made(tmp_path, diff)
    assert fix.modules["vllm.v1.later"].read_text() == CORE
    assert patched(fix, tree) == {"vllm.v1.core": FIRST.encode()}


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("dos.py", b"A = 1\r\nB = 3\r\nC = 3\r\n"),
        ("endless.py", b"A = 1\nB = 3"),
        ("endless.py", b"A = 1\nB = 2\nC = 3\n"),
        ("core.py", CORE.replace("x + 2", "x + 3").removesuffix("\n").encode()),
    ],
)
def test_line_ends_are_kept(name: str, new: bytes, tmp_path: Path, tree: Tree, repo: Repo) -> None:
    repo.write({f"vllm/v1/{name}": new})
    fix, _ = made(tmp_path, repo.diff())
    assert patched(fix, tree) == {f"vllm.v1.{name.removesuffix('.py')}": new}


def test_line_ends_are_kept_over_several_commits(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    for text in (b"A = 1\nB = 3", b"A = 4\nB = 3\nC = 5"):
        repo.write({"vllm/v1/endless.py": text})
        repo.commit("one")
    fix, _ = made(tmp_path, repo.mails())
    assert patched(fix, tree) == {"vllm.v1.endless": b"A = 4\nB = 3\nC = 5"}


def test_a_diff_that_was_saved_with_windows_line_ends(
    tmp_path: Path, tree: Tree, repo: Repo
) -> None:
    repo.write({"vllm/v1/core.py": FIRST, "vllm/v1/new.py": "X = 1\n"})
    fix, _ = made(tmp_path, repo.diff().replace(b"\n", b"\r\n"))
    assert patched(fix, tree) == {"vllm.v1.core": FIRST.encode()}
    assert fix.modules["vllm.v1.new"].read_bytes() == b"X = 1\n"


def test_a_plain_diff_without_git(tmp_path: Path, tree: Tree) -> None:
    new = (
        b"--- a/vllm/v1/new.py\t1970-01-01 00:00:00\n+++ b/vllm/v1/new.py\n@@ -0,0 +1 @@\n+X = 1\n"
    )
    fix, _ = made(tmp_path, b"diff -ruN a b\n" + new)
    assert fix.modules["vllm.v1.new"].read_text() == "X = 1\n"


def test_a_changed_mode_and_comments_are_left_out(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    commented = CORE.replace("# a comment", "# another")
    repo.write({"vllm/v1/core.py": commented, "vllm/v1/gone.py": "OLD = 2\nKEPT = 2\nMORE = 3\n"})
    (repo.root / "vllm/v1/dos.py").chmod(0o755)
    fix, result = made(tmp_path, repo.diff())
    assert list(patched(fix, tree)) == ["vllm.v1.gone"]
    assert dict(result.left_out) == {
        "vllm/v1/dos.py": "changes only the file's mode",
        "vllm/v1/core.py": "changes no code",
    }


def test_an_edit_that_only_adds_is_reviewed_by_what_it_stands_in(
    tmp_path: Path, tree: Tree, repo: Repo
) -> None:
    more = f"{CORE}\n    def more(self):\n        return 2\n"
    repo.write({"vllm/v1/core.py": more, "vllm/v1/gone.py": f"{FILES['v1/gone.py']}NEW = 1\n"})
    fix, _ = made(tmp_path, repo.diff())
    assert fix.reviewed[VERSION].keys() == {"vllm.v1.core", "vllm.v1.gone"}
    assert list(fix.reviewed[VERSION]["vllm.v1.core"]) == ["Engine"]
    assert list(fix.reviewed[VERSION]["vllm.v1.gone"]) == ["<module>"]
    assert patched(fix, tree)["vllm.v1.core"] == more.encode()


def test_a_new_file_that_a_later_commit_moves(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    repo.write({"vllm/v1/core.py": FIRST, "vllm/v1/a.py": CORE, "vllm/v1/b.py": SECOND})
    repo.commit("One")
    repo.git("mv", "vllm/v1/a.py", "vllm/v1/c.py")
    repo.git("mv", "vllm/v1/b.py", "tests/b.py")
    repo.commit("Two")
    fix, _ = made(tmp_path, repo.mails())
    assert list(fix.modules) == ["vllm.v1.c"]


# --- what is refused ---


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("csrc/a.cu", "compiled"),
        ("CMakeLists.txt", "compiled"),
        ("vllm/v1/new.cpp", "compiled"),
        ("setup.py", "packaging"),
        ("pyproject.toml", "packaging"),
        ("requirements/cuda.txt", "packaging"),
        ("vllm/config.json", "no Python source"),
        ("vllm/__init__.py", "a fix cannot change a module of this name"),
        ("tools/install.sh", "no part of what a server imports"),
    ],
)
def test_what_cannot_be_applied_at_import_time(
    path: str, why: str, tmp_path: Path, tree: Tree, repo: Repo
) -> None:
    repo.write({path: "changed\n", "vllm/v1/core.py": FIRST})
    (reason,) = refused(tmp_path, repo.diff())
    assert reason.startswith("public.diff:")
    assert f"{path}: " in reason
    assert why in reason


def test_every_reason_is_given_at_once(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    repo.write({"csrc/a.cu": "b\n", "setup.py": "b\n"})
    assert len(refused(tmp_path, repo.diff())) == 2


@pytest.mark.parametrize("similar", [True, False])
def test_a_module_cannot_be_renamed(similar: bool, tmp_path: Path, tree: Tree, repo: Repo) -> None:
    text = FILES["v1/gone.py"] + ("" if similar else "NEW = 1\n")
    repo.write({"vllm/v1/gone.py": None, "vllm/v1/there.py": text})
    diff = repo.diff("-M40%")
    assert b"rename from" in diff
    (reason,) = refused(tmp_path, diff)
    assert "vllm/v1/gone.py: it is renamed to vllm/v1/there.py" in reason


@pytest.mark.parametrize("plain", [True, False])
def test_a_module_cannot_be_deleted(plain: bool, tmp_path: Path, tree: Tree, repo: Repo) -> None:
    repo.write({"vllm/v1/gone.py": None})
    diff = repo.diff()
    if plain:  # as diff -N writes it
        diff = diff[diff.index(b"--- ") :].replace(b"/dev/null", b"b/vllm/v1/gone.py\t1970-01-01")
    (reason,) = refused(tmp_path, diff)
    assert "vllm/v1/gone.py: it is deleted" in reason


def test_a_link_and_a_binary_patch(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    (repo.root / "vllm/v1/link.py").symlink_to("core.py")
    repo.write({"vllm/v1/core.py": b"\0\1", "docs/a.png": b"\0\1\2"})
    link, binary = sorted(refused(tmp_path, repo.diff("--binary")))[::-1]
    assert "vllm/v1/link.py: a link" in link
    assert "vllm/v1/core.py: a binary patch" in binary


def test_each_hunk_that_does_not_fit_is_named(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    repo.write({"vllm/v1/core.py": BOTH})
    diff = repo.diff()
    (tree.root / "vllm/v1/core.py").write_text(FIRST.replace("total = x + 2", "total = x - 2"))
    one, two = refused(tmp_path, diff)
    assert one == (f"public.diff:5: hunk 1 is in vllm/v1/core.py of vLLM {VERSION} already")
    assert two.startswith(
        f"public.diff:14: hunk 2 does not match vllm/v1/core.py of vLLM {VERSION}"
    )


def test_what_follows_on_a_hunk_that_does_not_fit_is_not_named(
    tmp_path: Path, tree: Tree, repo: Repo
) -> None:
    for number in (10, 11, 12):
        repo.write({"vllm/v1/core.py": CORE.replace("x + 1", f"x + {number}")})
        repo.commit("one")
    (tree.root / "vllm/v1/core.py").write_text(CORE.replace("x + 1", "x - 1"))
    (reason,) = refused(tmp_path, repo.mails())
    assert "hunk 1 does not match" in reason


def test_edits_that_would_give_another_text(
    tmp_path: Path, tree: Tree, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.write({"vllm/v1/core.py": FIRST})
    diff = repo.diff()
    other = make_diff(CORE, SECOND, "v1/core.py").encode()
    monkeypatch.setattr(difftext, "_diff", lambda *_: other)
    (reason,) = refused(tmp_path, diff)
    assert "would not give what the diff gives" in reason


def test_a_file_that_is_there_already_or_not_at_all(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    repo.write({"vllm/v1/core.py": FIRST, "vllm/v1/new.py": "X = 1\n"})
    diff = repo.diff()
    (tree.root / "vllm/v1/new.py").write_text("Y = 1\n")
    (tree.root / "vllm/v1/core.py").rename(tree.root / "vllm/v1/cores.py")
    gone, there = refused(tmp_path, diff)
    assert "has no such file; did you mean 'vllm.v1.cores'?" in gone
    assert "vllm/v1/new.py: vLLM 9.9.0 has this file already" in there


def test_a_new_module_that_does_not_parse(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    repo.write({"vllm/v1/new.py": "X = = 1\n"})
    (reason,) = refused(tmp_path, repo.diff())
    assert reason.startswith("public.diff: vllm/v1/new.py:1: the file has a syntax error")


def test_a_new_module_without_its_package(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    repo.write({"vllm/lost/new.py": "X = 1\n"})
    (reason,) = refused(tmp_path, repo.diff())
    assert "its package vllm.lost does not exist" in reason


@pytest.mark.parametrize("path", ["../vllm/v1/x.py", "/vllm/v1/x.py", "vllm/../../x.py"])
def test_no_path_leaves_the_tree(path: str, tmp_path: Path, tree: Tree) -> None:
    diff = f"--- /dev/null\n+++ {path}\n@@ -0,0 +1 @@\n+X = 1\n"
    (reason,) = refused(tmp_path, diff.encode())
    assert "it leads out of vLLM's tree" in reason
    assert not list(tmp_path.rglob("x.py"))


def test_a_diff_of_tests_only(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    repo.write({"tests/test_core.py": "b\n", ".buildkite/a.yaml": "b\n", "examples/a.py": "b\n",
                "benchmarks/a.py": "b\n", "docs/b.png": b"\0"})  # fmt: skip
    (reason,) = refused(tmp_path, repo.diff("--binary"))
    for left_out in ("tests/test_core.py (tests)", ".buildkite/a.yaml (CI)", "docs/b.png (docs)",
                     "examples/a.py (examples)", "benchmarks/a.py (benchmarks)"):  # fmt: skip
        assert left_out in reason


# --- names and the skeleton ---


@pytest.mark.parametrize("name", ["", "Mine", "a_b", "a/b", "..", "-a", "a--b", "a" * 101, "é"])
def test_a_bad_name(name: str, tmp_path: Path, tree: Tree) -> None:
    with pytest.raises(UsageError, match="this is no name for a fix"):
        new_fix(name, tmp_path, None, str(tree.root), tmp_path / "home")


def test_a_name_that_is_taken(tmp_path: Path, tree: Tree) -> None:
    (tmp_path / "fixes/mine").mkdir(parents=True)
    with pytest.raises(UsageError, match="there is a fix of this name already"):
        new_fix("mine", tmp_path / "fixes", None, str(tree.root), tmp_path / "home")
    with pytest.raises(UsageError, match="VLLM_PORT, which is a variable of vLLM"):
        new_fix("port", tmp_path / "fixes", None, str(tree.root), tmp_path / "home")


def test_the_skeleton_refuses_to_apply_until_it_is_reviewed(tmp_path: Path, tree: Tree) -> None:
    utils = tree.root / "vllm/v1/core/sched/utils.py"
    utils.parent.mkdir(parents=True)
    utils.write_text("def check_stop():\n    pass\n")
    (tree.root / "vllm/v1/core.py").unlink()
    result = new_fix("mine", tmp_path, None, str(tree.root), tmp_path / "home")
    (judged,) = judge([load_fix(result.folder)], tree)
    assert judged.verdict == "incompatible"


def test_the_command_names_all(tmp_path: Path, tree: Tree, repo: Repo) -> None:
    repo.write({"vllm/v1/core.py": FIRST, "tests/test_core.py": "b\n"})
    (tmp_path / "x.diff").write_bytes(repo.diff())
    (tmp_path / "fixes").mkdir()
    command = ["new-fix", "mine", "--from-diff", "x.diff", "--fixes", "fixes", "--vllm", "site"]
    done = overlay(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "vllm.v1.core: first: new, " in done.stdout
    assert "left out: tests/test_core.py (tests)" in done.stdout
    assert "made fixes/mine" in done.stdout
    done = overlay(command, tmp_path)
    assert done.returncode == 2
    assert done.stderr == "vllm-overlay: fixes/mine: there is a fix of this name already\n"
