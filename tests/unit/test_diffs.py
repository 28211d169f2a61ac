"""The diff engine: sound diffs only, each hunk in exactly one place, no fuzz."""

from __future__ import annotations

import difflib
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_overlay.diffs import DiffError, apply, parse, reverse_applies

OLD = b"".join(b"line %d\n" % n for n in range(1, 31))
NO_END = b"\n\\ No newline at end of file\n"
NEW = OLD.replace(b"line 10\n", b"ten\n").replace(b"line 20\n", b"line 20\nand a half\n")


def diff(old: bytes, new: bytes, path: str = "vllm/a.py", context: int = 3) -> bytes:
    """Make a unified diff as git does, with its mark for a missing last line feed."""
    lines = difflib.diff_bytes(
        difflib.unified_diff, old.splitlines(True), new.splitlines(True),
        b"a/" + path.encode(), b"b/" + path.encode(), n=context,
    )  # fmt: skip
    return b"".join(line if line.endswith(b"\n") else line + NO_END for line in lines)


def patched(source: bytes, text: bytes) -> bytes:
    (part,) = parse(text, "x.diff")
    return apply(source, part, "vllm.a")


def error(source: bytes, text: bytes) -> str:
    with pytest.raises(DiffError) as caught:
        patched(source, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- reading ---


def test_both_forms_name_their_file() -> None:
    (plain,) = parse(diff(OLD, NEW), "x.diff")
    git = b"From 1 Mon\nSubject: x\n---\n a.py | 2 +-\n\ndiff --git a/vllm/a.py b/vllm/a.py\n"
    git += b"index 123..456 100644\n" + diff(OLD, NEW) + b"-- \n2.39.5\n\n"
    (with_git,) = parse(git, "x.diff")
    assert plain.path == with_git.path == "vllm/a.py"
    assert apply(OLD, with_git, "m") == NEW
    assert [hunk.number for hunk in plain.hunks] == [1, 2]
    assert plain.hunks[0].line == 3
    assert not plain.renamed


def test_new_removed_renamed_and_binary_files() -> None:
    text = (
        b"diff --git a/n.py b/n.py\nnew file mode 100644\nindex 000..111\n"
        b"--- /dev/null\n+++ b/n.py\n@@ -0,0 +1 @@\n+x = 1\n"
        b"diff --git a/d.py b/d.py\ndeleted file mode 100644\n"
        b"--- a/d.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x = 1\n"
        b"diff --git a/o.py b/r.py\nsimilarity index 100%\nrename from o.py\nrename to r.py\n"
        b"diff --git a/b.so b/b.so\nindex 1..2\nBinary files a/b.so and b/b.so differ\n"
    )
    new, gone, moved, binary = parse(text, "x.diff")
    assert (new.old_path, new.new_path) == (None, "n.py")
    assert apply(b"", new, "n") == b"x = 1\n"
    assert (gone.old_path, gone.new_path) == ("d.py", None)
    assert apply(b"x = 1\n", gone, "d") == b""
    assert moved.renamed
    assert (moved.old_path, moved.new_path) == ("o.py", "r.py")
    assert binary.binary


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"hello\n",
        b"\xff\xfe\0",
        b"@@ -1 +1 @@\n-a\n+b\n",
        b"--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a\n+b\n",
        b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n+c\n",
        b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n c\n",
        b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n-c\n",
        b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n@@ wrong @@\n-c\n",
        b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n a\n",
        b"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-a\n\\ No newline at end of file\n+b\n c\n",
        b"--- a/x\n+++ b/x\n@@ -0,0 +0,0 @@\n",
        b"--- a/x\n+++ b/x\n@@ -%s +1 @@\n-a\n+b\n" % (b"9" * 5000),
    ],
)
def test_an_unsound_diff_is_refused(text: bytes) -> None:
    with pytest.raises(DiffError, match=r"^x\.diff"):
        parse(text, "x.diff")


def test_a_header_that_would_take_unidiff_half_a_minute_is_refused() -> None:
    assert "a header is too long" in error(b"", b"Binary file " + b"a and " * 4000 + b"\n")


def test_a_diff_without_hunks_does_not_apply() -> None:
    assert "no hunk for x" in error(b"a\n", b"--- a/x\n+++ b/x\n")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300) | st.lists(st.sampled_from(
    [b"--- a/x\n", b"+++ b/x\n", b"@@ -1 +1 @@\n", b"@@ -1,2 +1,2 @@\n", b"-a\n", b"+b\n", b" a\n",
     b"\\ No newline at end of file\n", b"diff --git a/x b/x\n", b"\n", b"\r\n", b"-- \n",
     b"rename from x\n", b"new file mode 100644\n", b"Binary files a/x and b/x differ\n",
     b"GIT binary patch\n", b"@@ -0,0 +1 @@\n", b"a"]), max_size=12).map(b"".join))  # fmt: skip
def test_any_bytes_end_in_a_diff_or_an_error(text: bytes) -> None:
    try:
        for part in parse(text, "x.diff"):
            apply(b"a\nb\na\n", part, "m")
    except DiffError as caught:
        assert "\n" not in str(caught)


# --- applying ---


LINES = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"c\r\n", b"\n", b"d\xe9\x0c\x85\n"]), max_size=25
)
TAIL = st.sampled_from([b"", b"end", b"end\r"])


@settings(max_examples=400, deadline=None)
@given(LINES, TAIL, LINES, TAIL)
def test_a_diff_turns_old_into_new_and_back(
    old_lines: list[bytes], old_tail: bytes, new_lines: list[bytes], new_tail: bytes
) -> None:
    old, new = b"".join(old_lines) + old_tail, b"".join(new_lines) + new_tail
    if old == new:
        return
    olds, news = lines_of(old), lines_of(new)
    text = b"--- a/x\n+++ b/x\n"
    text += b"@@ -%d,%d +%d,%d @@\n" % (bool(olds), len(olds), bool(news), len(news))
    for mark, lines in ((b"-", olds), (b"+", news)):
        for line in lines:
            text += mark + line + (b"" if line.endswith(b"\n") else NO_END)
    (part,) = parse(text, "x.diff")
    assert apply(old, part, "m") == new
    assert reverse_applies(new, part)
    assert apply(new, part.reversed(), "m") == old


def lines_of(text: bytes) -> list[bytes]:
    return [line for line in text.replace(b"\n", b"\n\0").split(b"\0") if line]


def test_shifted_lines_are_fine() -> None:
    assert patched(b"# new\n" * 7 + OLD, diff(OLD, NEW)) == b"# new\n" * 7 + NEW
    assert patched(OLD[7 * 3 :], diff(OLD, NEW)) == NEW[7 * 3 :]


def test_no_fuzz() -> None:
    said = error(OLD.replace(b"line 9\n", b"line nine\n"), diff(OLD, NEW))
    assert said.startswith("x.diff:3: hunk 1 does not match vllm.a")
    said = error(OLD.replace(b"line 23\n", b"line 23 \n"), diff(OLD, NEW))
    assert said.startswith("x.diff:12: hunk 2 does not match vllm.a")


TWICE = b"a\nb\nc\nX\nd\ne\nf\n" + b"-\n" * 20 + b"a\nb\nc\nX\nd\ne\nf\n" + b"-\n" * 4


def test_a_hunk_with_two_places_takes_the_nearest_as_git_does() -> None:
    last = TWICE[:-16].rindex(b"X")
    change = diff(TWICE, TWICE[:last] + b"Y" + TWICE[last + 1 :])
    for top in (b"", b"# shifted\n", b"# shifted\n" * 13):
        assert patched(top + TWICE, change) == top + TWICE[:last] + b"Y" + TWICE[last + 1 :]
    first_is_nearer = b"# shifted\n" * 14 + TWICE
    assert patched(first_is_nearer, change).index(b"Y") == first_is_nearer.index(b"X")


def test_two_places_equally_near_are_refused() -> None:
    block = TWICE[:14]
    old = b"0\n" * 14 + block + b"0\n" * 30
    source = block + b"-\n" * 21 + block + b"-\n" * 9
    said = error(source, diff(old, old.replace(b"X", b"Y")))
    assert "hunk 1 matches vllm.a in 2 places equally well; found lines 1, 29; expected one" in said


def test_the_order_of_hunks_decides_between_places() -> None:
    source = TWICE.replace(b"-\n" * 20, b"-\n" * 10 + b"middle\n" + b"-\n" * 10)
    last = source.rindex(b"X")
    changed = source.replace(b"middle", b"MIDDLE")[:last] + b"Y" + source[last + 1 :]
    assert patched(b"# shifted\n" + source, diff(source, changed)) == b"# shifted\n" + changed


AROUND = b"head\n" + b"=\n" * 9 + TWICE + b"=\n" * 9 + b"tail\n"
LONG = b"1\n2\n3\n4\n" + AROUND + b"1\n2\n3\n4\n"


@pytest.mark.parametrize("at", [LONG.index(b"X"), LONG.rindex(b"X")], ids=["first", "last"])
@pytest.mark.parametrize("neighbours", [(b"head",), (b"tail",), (b"head", b"tail")])
def test_the_shift_of_its_neighbours_decides(at: int, neighbours: tuple[bytes, ...]) -> None:
    changed = LONG[:at] + b"Y" + LONG[at + 1 :]
    for name in neighbours:
        changed = changed.replace(name, name.upper())
    assert patched(b"# shifted\n" + LONG, diff(LONG, changed)) == b"# shifted\n" + changed


def test_of_neighbours_that_shifted_apart_the_nearer_decides() -> None:
    """The hunk fits where the one before it went, and where the one behind it went."""
    first = LONG.index(b"X")
    changed = (LONG[:first] + b"Y" + LONG[first + 1 :]).replace(b"head", b"HEAD")
    changed = changed.replace(b"tail", b"TAIL")
    moved = LONG.replace(b"=\ntail", b"=\n" * 28 + b"tail")  # by what lies between the places
    for top in (b"", b"# new\n"):
        assert patched(top + moved, diff(LONG, changed)).index(b"Y") == len(top) + first


def test_hunks_out_of_order_are_refused() -> None:
    header, first, second = diff(OLD, NEW).split(b"@@ -", 2)
    assert "before the hunk" in error(OLD, header + b"@@ -" + second + b"@@ -" + first)


def test_an_insertion_without_context_needs_an_empty_file() -> None:
    text = b"--- a/x\n+++ b/x\n@@ -0,0 +1 @@\n+x\n"
    assert patched(b"", text) == b"x\n"
    assert "does not match" in error(b"y\n", text)
    assert "does not match" in error(OLD, diff(OLD, NEW, context=0))


def test_context_cut_short_by_an_end_of_the_file_stands_there() -> None:
    at_end = diff(b"a\nb\n", b"a\nb\nc\n")
    assert patched(b"a\nb\n", at_end) == b"a\nb\nc\n"
    assert "does not match" in error(b"a\nb\nz\n", at_end)
    at_start = diff(b"a\nb\nc\nd\n", b"0\na\nb\nc\nd\n")
    assert patched(b"a\nb\nc\nz\n", at_start) == b"0\na\nb\nc\nz\n"
    assert "does not match" in error(b"z\na\nb\nc\nd\n", at_start)


def test_a_hunk_begins_where_a_line_begins() -> None:
    text = diff(b"b\n" * 3 + b"c\n" + b"d\n" * 3, b"b\n" * 3 + b"d\n" * 3)
    assert "does not match" in error(b"ab\n" + b"b\n" * 2 + b"c\n" + b"d\n" * 3, text)


def test_a_missing_last_line_feed_counts() -> None:
    text = diff(b"a\nb", b"a\nc")
    assert patched(b"a\nb", text) == b"a\nc"
    assert "does not match" in error(b"a\nb\n", text)


def test_windows_line_ends() -> None:
    crlf, new_crlf = OLD.replace(b"\n", b"\r\n"), NEW.replace(b"\n", b"\r\n")
    text = diff(OLD, NEW)
    carried = text.replace(b"\n", b"\r\n")  # a diff that lost its own line ends on its way
    assert patched(OLD, carried) == NEW
    assert patched(crlf, carried) == new_crlf
    assert "does not match" in error(crlf, text)
    assert patched(crlf, diff(crlf, new_crlf)) == new_crlf


def test_upstream_that_has_the_change_is_recognized() -> None:
    (part,) = parse(diff(OLD, NEW), "x.diff")
    assert reverse_applies(b"# shifted\n" + NEW, part)
    assert not reverse_applies(OLD, part)
    assert not reverse_applies(OLD.replace(b"line 10\n", b"ten\n"), part)  # one hunk of two


SHIFTS = [
    OLD,
    b"#" + OLD,
    b"#\n" * 3 + OLD,
    OLD[7:],
    OLD + b"more\n",
    OLD.replace(b"line 15\n", b""),
    OLD.replace(b"line 9\n", b"9\n"),
    OLD.replace(b"line 17\n", b"line 17 \n"),
    NEW,
    b"#\n" + NEW,
    OLD[:-1],
    OLD.replace(b"\n", b"\r\n"),
]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("source", SHIFTS, ids=range(len(SHIFTS)))
@pytest.mark.parametrize("reverse", [False, True])
def test_git_agrees(source: bytes, reverse: bool, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    file = tmp_path / "vllm" / "a.py"
    file.write_bytes(source)
    text = diff(OLD, NEW)
    done = subprocess.run(["git", "apply", *(["-R"] if reverse else [])], input=text, cwd=tmp_path)
    (part,) = parse(text, "x.diff")
    try:
        ours = apply(source, part.reversed() if reverse else part, "m")
    except DiffError:
        assert done.returncode != 0
    else:
        assert (done.returncode, file.read_bytes()) == (0, ours)
