"""`review`: what changed is shown, a person agrees, and only then are digests recorded."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.support.command import argv, environment, overlay
from tests.support.trees import make_diff, make_fix, write_tree
from tests.support.verdicts import CORE, FIRST, edit_fix, hook_fix, tree_of
from vllm_overlay.fix import Fix, load_fix
from vllm_overlay.verdict import judge

NEWER = CORE.replace("total = x + 2", "total = x + 3").replace("# a comment", "# another")


def put_release(folder: Path, core: str, version: str) -> Path:
    """Put a made-up release where the fetched ones are kept."""
    root = folder / "home" / "releases" / version
    return write_tree(root, {"v1/__init__.py": "", "v1/core.py": core}, version)


def reviewed_fix(tmp_path: Path) -> Fix:
    """A hook that was reviewed for 9.9.0, whose first() is CORE's and whose second() is too."""
    return hook_fix(tmp_path, "mine", ["first", "second"])


def run(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return overlay(["review", "mine", "--fixes", "fixes", *options], tmp_path)


def asked(tmp_path: Path, answer: str, *options: str, typing: bool = True) -> tuple[int, str]:
    """Run the command on a terminal, answer its question, and return status and screen.

    ``typing``: it reads from the terminal, too.
    """
    master, slave = pty.openpty()
    command = argv(["review", "mine", "--fixes", "fixes", *options])
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(tmp_path),
        stdin=slave if typing else subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
    ) as process:
        os.close(slave)
        screen = b""
        try:
            while data := os.read(master, 65536):
                screen += data
                if b"[y/N] " in screen and answer:
                    os.write(master, answer.encode())
                    answer = ""
        except OSError:  # the terminal has gone with its last process
            pass
        os.close(master)
        return process.wait(), screen.decode().replace("\r\n", "\n")


def test_the_difference_is_shown_and_recorded(tmp_path: Path) -> None:
    fix = reviewed_fix(tmp_path)
    put_release(tmp_path, CORE, "9.9.0")
    put_release(tmp_path, NEWER, "9.10.0")
    done = run(tmp_path, "--vllm", "9.10.0", "--yes")
    assert done.returncode == 0, done.stderr
    assert "vllm.v1.core: first: the same, " in done.stdout
    assert "-    total = x + 2\n    +    total = x + 3\n" in done.stdout
    assert "another" not in done.stdout
    after = load_fix(fix.folder)
    symbols = tree_of(tmp_path / "newer", NEWER).symbols("vllm.v1.core")
    new = {"vllm.v1.core": {name: symbols[name] for name in ("first", "second")}}
    assert after.reviewed == {**fix.reviewed, "9.10.0": new}


def test_without_a_terminal_it_refuses(tmp_path: Path) -> None:
    fix = reviewed_fix(tmp_path)
    before = fix.file.read_bytes()
    put_release(tmp_path, CORE, "9.9.0")
    put_release(tmp_path, NEWER, "9.10.0")
    done = run(tmp_path, "--vllm", "9.10.0")
    assert done.returncode == 2
    assert "total = x + 3" in done.stdout
    assert "run it on a terminal, or give --yes" in done.stderr
    assert fix.file.read_bytes() == before


@pytest.mark.parametrize(
    ("answer", "status"), [("y\n", 0), ("yes\n", 0), ("n\n", 1), ("\n", 1), ("\x04", 1)]
)
def test_on_a_terminal_it_asks(answer: str, status: int, tmp_path: Path) -> None:
    fix = reviewed_fix(tmp_path)
    before = fix.file.read_bytes()
    put_release(tmp_path, CORE, "9.9.0")
    put_release(tmp_path, NEWER, "9.10.0")
    found, screen = asked(tmp_path, answer, "--vllm", "9.10.0")
    assert found == status, screen
    assert "Does mine still do the right thing on vLLM 9.10.0? [y/N] " in screen
    assert (fix.file.read_bytes() == before) == bool(status)
    assert ("nothing was recorded" in screen) == bool(status)


def test_a_terminal_that_only_shows_is_none(tmp_path: Path) -> None:
    reviewed_fix(tmp_path)
    put_release(tmp_path, CORE, "9.10.0")
    status, screen = asked(tmp_path, "y\n", "--vllm", "9.10.0", typing=False)
    assert status == 2
    assert "nobody can be asked here" in screen


def test_the_same_code_in_another_release_is_recorded(tmp_path: Path) -> None:
    fix = reviewed_fix(tmp_path)
    put_release(tmp_path, CORE, "9.10.0")
    assert run(tmp_path, "--vllm", "9.10.0", "--yes").returncode == 0
    reviewed = load_fix(fix.folder).reviewed
    assert reviewed["9.10.0"] == reviewed["9.9.0"]


def test_a_release_is_compared_with_its_own_record(tmp_path: Path) -> None:
    symbols = tree_of(tmp_path / "digests", CORE).symbols("vllm.v1.core")
    old = {"vllm.v1.core": {"first": symbols["first"], "second": "0" * 64}}
    newer = {"vllm.v1.core": {"first": "1" * 64}}
    hook_fix(tmp_path, "mine", reviewed={"9.9.0": old, "9.10.0": newer})
    put_release(tmp_path, CORE, "9.9.0")
    done = run(tmp_path, "--vllm", "9.9.0", "--yes")
    assert "first: the same, " in done.stdout
    assert "second: new, " in done.stdout  # zeros stand for a digest that is yet to be found
    after = load_fix(tmp_path / "fixes/mine").reviewed
    assert after["9.9.0"] == {"vllm.v1.core": {n: symbols[n] for n in ("first", "second")}}
    assert after["9.10.0"] == newer


def test_the_release_to_fetch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fix = reviewed_fix(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    put_release(tmp_path, NEWER, "9.10.0")
    done = run(tmp_path, "--vllm", "9.10.0", "--yes")
    assert done.returncode == 0, done.stderr
    assert "no source to compare with; fetch vLLM 9.9.0 (check --vllm 9.9.0): " in done.stdout
    assert "9.10.0" in load_fix(fix.folder).reviewed


def test_a_release_that_is_not_what_was_reviewed(tmp_path: Path) -> None:
    reviewed_fix(tmp_path)
    put_release(tmp_path, FIRST.replace("x + 2", "x + 9"), "9.9.0")
    put_release(tmp_path, NEWER, "9.10.0")
    done = run(tmp_path, "--vllm", "9.10.0")
    assert "vLLM 9.9.0 as released has another digest, too" in done.stdout


def test_what_is_recorded_already_is_not_asked_for(tmp_path: Path) -> None:
    fix = reviewed_fix(tmp_path)
    before = fix.file.read_bytes()
    put_release(tmp_path, CORE, "9.9.0")
    done = run(tmp_path, "--vllm", "9.9.0")
    assert done.returncode == 0, done.stderr
    assert "all of it is recorded for vLLM 9.9.0 already" in done.stdout
    assert fix.file.read_bytes() == before


def test_a_release_out_of_range_is_said(tmp_path: Path) -> None:
    hook_fix(tmp_path, "mine", ["first"], vllm="==9.9.0")
    put_release(tmp_path, NEWER, "9.10.0")
    done = run(tmp_path, "--vllm", "9.10.0")
    assert "outside of the fix's range ==9.9.0: change 'vllm', too" in done.stdout


def test_a_changed_edit_gets_the_symbols_that_it_changes(tmp_path: Path) -> None:
    fix = edit_fix(tmp_path, "mine", FIRST, reviewed=["second"])
    root = put_release(tmp_path, CORE, "9.9.0")
    assert run(tmp_path, "--vllm", str(root), "--yes").returncode == 0
    after = load_fix(fix.folder)
    assert list(after.reviewed["9.9.0"]["vllm.v1.core"]) == ["second", "first"]
    (judged,) = judge([after], tree_of(tmp_path / "other", CORE))
    assert judged.verdict == "apply"


def test_a_fix_on_top_of_another(tmp_path: Path) -> None:
    edit_fix(tmp_path, "below", FIRST, reviewed=["first"])
    both = FIRST.replace("total = x + 10", "total = x + 100")
    diff = make_diff(FIRST, both, "v1/core.py")
    edits = {"vllm.v1.core": "core.diff"}
    make_fix(tmp_path / "fixes", "mine", {"core.diff": diff}, edits=edits, after=["below"])
    put_release(tmp_path, CORE, "9.9.0")
    done = run(tmp_path, "--vllm", "9.9.0", "--yes")
    assert done.returncode == 0, done.stderr
    fixes = [load_fix(tmp_path / "fixes" / name) for name in ("below", "mine")]
    judged = judge(fixes, tree_of(tmp_path / "other", CORE))
    assert [item.verdict for item in judged] == ["apply", "apply"]


def test_an_upstreamed_fix_has_nothing_to_review(tmp_path: Path) -> None:
    fix = edit_fix(tmp_path, "mine", FIRST, reviewed=["first"])
    before = fix.file.read_bytes()
    put_release(tmp_path, FIRST, "9.10.0")
    done = run(tmp_path, "--vllm", "9.10.0", "--yes")
    assert done.returncode == 0
    assert "nothing to review: vLLM 9.10.0 carries it" in done.stdout
    assert fix.file.read_bytes() == before


def test_an_edit_that_does_not_apply_is_not_reviewed(tmp_path: Path) -> None:
    edit_fix(tmp_path, "mine", FIRST, reviewed=["first"])
    put_release(tmp_path, CORE.replace("total = x + 1\n", "total = x - 1\n"), "9.10.0")
    done = run(tmp_path, "--vllm", "9.10.0", "--yes")
    assert done.returncode == 78
    assert "hunk 1 does not match" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["mines", "../fixes/mine", "a" * 300, ""])
def test_a_name_that_is_no_fix(name: str, tmp_path: Path) -> None:
    reviewed_fix(tmp_path)
    done = overlay(["review", name, "--fixes", "fixes"], tmp_path)
    assert done.returncode == 2
    assert "there is no fix" in done.stderr
    assert ("did you mean 'mine'?" in done.stderr) == (name == "mines")


def test_json(tmp_path: Path) -> None:
    reviewed_fix(tmp_path)
    put_release(tmp_path, CORE, "9.9.0")
    put_release(tmp_path, NEWER, "9.10.0")
    done = run(tmp_path, "--vllm", "9.10.0", "--json", "--yes")
    assert done.returncode == 0
    assert '"compared_with": "9.9.0"' in done.stdout
    assert '"+    total = x + 3"' in done.stdout
