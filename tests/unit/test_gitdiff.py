"""Public diffs taken apart: what belongs to which file, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.diffs import DiffError
from vllm_overlay.gitdiff import MAX_LINES, MAX_PARTS, read

HUNK = b"@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
ONE = b"--- a/x.py\n+++ b/x.py\n" + HUNK
MAIL = (
    b"From 0123 Mon Sep 17 00:00:00 2001\nFrom: A <a@b>\nSubject: %s\n\ntext\n---\n x.py | 2 +-\n\n"
)


def test_a_git_header_without_hunks() -> None:
    text = (
        b"diff --git a/m.py b/m.py\nold mode 100644\nnew mode 100755\n"
        b"diff --git a/e.py b/e.py\nnew file mode 100644\nindex 0000000..e69de29\n"
        b"diff --git a/d.py b/d.py\ndeleted file mode 100644\nindex e69de29..0000000\n"
        b"diff --git a/o.py b/n.py\nsimilarity index 100%\nrename from o.py\nrename to n.py\n"
        b"diff --git a/o.py b/c.py\nsimilarity index 100%\ncopy from o.py\ncopy to c.py\n"
        b"diff --git a/b c.png b/b c.png\nindex 1..2 100644\nBinary files a/b c.png and b/b c.png"
        b" differ\ndiff --git a/l b/l\nnew file mode 120000\n"
        b"diff --git a/l b/l\nindex 1..2 120000\n--- a/l\n+++ b/l\n" + HUNK
    )
    parts = read(text, "d").parts
    assert [(part.kind, part.old_path, part.new_path) for part in parts] == [
        ("mode", "m.py", "m.py"),
        ("new", None, "e.py"),
        ("deleted", "d.py", None),
        ("renamed", "o.py", "n.py"),
        ("copied", "o.py", "c.py"),
        ("change", "b c.png", "b c.png"),
        ("new", None, "l"),
        ("change", "l", "l"),
    ]
    assert [part.binary for part in parts] == [False] * 5 + [True, False, False]
    assert [part.link for part in parts] == [False] * 6 + [True, True]
    assert [part.line for part in parts] == [1, 4, 7, 10, 14, 18, 21, 23]


def test_a_binary_patch_is_no_text_of_a_mail() -> None:
    text = (
        b"diff --git a/b b/b\nindex 1..2 100644\nGIT binary patch\nliteral 3\nKcmZQzWMT#Y01f~L\n\n"
    )
    parts = read(text + b"literal 0\nHcmV?d00001\n\n" + ONE, "d").parts
    assert [(part.path, part.binary, part.commit) for part in parts] == [
        ("b", True, 0),
        ("x.py", False, 0),
    ]


def test_mails_in_a_row() -> None:
    text = MAIL % b"[PATCH v2 1/2] One\n two" + ONE + b"-- \n2.39.5\n\n" + MAIL % b"Two" + ONE
    public = read(text, "d")
    assert public.subject == "One two"
    assert [part.hunks for part in public.parts] == [HUNK, HUNK]
    one, two = (part.commit for part in public.parts)
    assert one < two


@pytest.mark.parametrize(
    ("subject", "read_as"),
    [
        (b"=?UTF-8?q?Gr=C3=B6=C3=9Fer?=", "Größer"),
        (b"=?UTF-8?q?a=00b?=", r"a\x00b"),
        (b"=?no-such?q?a?=", None),
        (b"[PATCH]", None),
    ],
)
def test_the_subject(subject: bytes, read_as: str | None) -> None:
    assert read(MAIL % subject + ONE, "d").subject == read_as


def test_the_page_of_a_pull_request_is_preferred() -> None:
    text = b"see https://a.example/x,\nand (https://github.com/v/v/pull/7).\n"
    assert read(text + ONE, "d").url == "https://github.com/v/v/pull/7"
    assert read(b"see https://a.example/x, too\n" + ONE, "d").url == "https://a.example/x"
    assert read(ONE + b" https://a.example\n".strip() + b"\n", "d").url == "https://a.example"
    in_hunk = b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-https://a.example\n+b\n"
    assert read(in_hunk, "d").url is None


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (HUNK, 1, "a hunk without the file"),
        (ONE + b"\n" + HUNK, 8, "a hunk without the file"),
        (b"diff --cc x.py\nindex 1,2..3\n--- a/x\n+++ b/x\n@@@ -1 -1 +1 @@@\n", 1, "combined"),
        (ONE + b"+lost\n", 7, "longer than its header says"),
        (b"prose\n" + ONE.replace(b"-1,2", b"-1,3"), 2, "shorter than expected"),
        (b"prose\n--- a/x\n+++ b/x\n", 2, "no hunk"),
        (b"diff --git a/x b/y\nnew file mode 100644\n", 1, "git's header is not understood"),
        (b"diff --git a/ b/\nnew file mode 100644\n", 1, "names no file"),
        (b"--- /dev/null\n+++ /dev/null\n" + HUNK, 2, "names no file"),
        (b"--- a/x\n+++ b/x\n@@ -1,%s +1 @@\n-a\n+b\n" % (b"1" * 5000), 1, ""),
        (ONE.replace(b"-1,2", b"-1,9") + ONE, 1, "no sound unified diff"),
        (b"nothing", None, "no unified diff found"),
        (b"", None, "no unified diff found"),
        (ONE + b"\n" * MAX_LINES, None, "the diff is too long"),
        (b"diff --git a/x b/x\n" * (MAX_PARTS + 1), None, "too many files"),
    ],
)
def test_what_is_refused(text: bytes, line: int | None, what: str) -> None:
    with pytest.raises(DiffError) as caught:
        read(text, "d")
    assert what in str(caught.value)
    assert line is None or caught.value.line == line


LINES = st.sampled_from(
    [b"--- a/x.py", b"+++ b/x.py", b"@@ -1,2 +1,2 @@", b"@@ -0,0 +1 @@", b" a", b"-b", b"+c", b"",
     b"\\ No newline at end of file", b"diff --git a/x.py b/x.py", b"new file mode 100644", b"-- ",
     b"rename from x.py", b"rename to y.py", b"GIT binary patch", b"literal 1", b"--- /dev/null",
     b"Subject: a", b"From a", b"index 1..2 120000", b"+++ b/", b"\0\xff"]
)  # fmt: skip
ENDS = st.sampled_from([b"\n", b"\r\n"])


@given(st.lists(LINES, max_size=30), ENDS)
def test_any_mix_of_lines_is_parts_or_a_clear_error(lines: list[bytes], end: bytes) -> None:
    try:
        parts = read(end.join(lines), "d").parts
    except DiffError as error:
        assert "\n" not in str(error)
    else:
        assert all(part.path for part in parts)
        shown = sum(line.startswith(b"@@") for line in lines)
        assert sum(len(part.diff.hunks) for part in parts if part.diff) <= shown


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    for text in (data, ONE + data, data + ONE, MAIL.replace(b"%s", data) + ONE):
        try:
            read(text, "d")
        except DiffError as error:
            assert "\n" not in str(error)
