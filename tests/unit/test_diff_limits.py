"""Diffs made to cost time or memory: each ends, soon and small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.trees import make_fix, make_tree
from vllm_overlay.diffs import MAX_BYTES, MAX_HUNKS, MAX_LINES, MAX_PLACES, DiffError, parse, place
from vllm_overlay.verdict import judge

LARGE = 200  # MiB that no input may take
HEAD = b"--- a/x\n+++ b/x\n"
N = MAX_LINES
FORMS = {
    "one hunk": f"HEAD + b'@@ -1,{N - 9} +1 @@\\n' + b'-a\\n' * {N - 9} + b'+b\\n'",
    "long lines": f"HEAD + b'@@ -1,90 +1 @@\\n' + (b'-' + b'a' * {MAX_BYTES // 100} + b'\\n') * 90"
    " + b'+b\\n'",
    "too many hunks": f"HEAD + b''.join(HUNK % (n, n) for n in range(2, {N // 4}))",
    "hunks": f"HEAD + b''.join(HUNK % (n, n) for n in range(2, {MAX_HUNKS}))",
    "files": f"(HEAD + b'@@ -1 +1 @@\\n-a\\n+b\\n') * {N // 5}",
    "headers": f"b'diff --git a/x b/x\\n' * {N}",
    "empty lines": f"b'\\n' * {N}",
    "too many lines": f"b'\\n' * {N + 1}",
    "too many bytes": f"b'a' * {MAX_BYTES + 1}",
}
CHILD = """if True:
    import re
    from vllm_overlay.diffs import DiffError, parse, place
    HUNK = b"@@ -%d,2 +%d,2 @@\\n-a\\n+b\\n a\\n"
    HEAD = b"--- a/x\\n+++ b/x\\n"
    try:
        part = parse(TEXT, "x.diff")[0]
        place(b"a\\n" * PLACES, part, "m")
    except DiffError as error:
        assert "\\n" not in str(error)
    # ru_maxrss would count what the parent had when it forked.
    print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("places", [MAX_PLACES - 1, 100_000])
def test_no_diff_takes_much_memory(form: str, places: int) -> None:
    code = CHILD.replace("TEXT", FORMS[form]).replace("PLACES", str(places))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-500:]
    assert int(run.stdout) < LARGE


@pytest.mark.parametrize("text", [b"\n" * (MAX_LINES + 1), b"a" * (MAX_BYTES + 1)])
def test_a_diff_has_a_limit(text: bytes) -> None:
    with pytest.raises(DiffError, match="the diff is too large"):
        parse(text, "x.diff")


def test_many_hunks_with_many_places_each_are_refused() -> None:
    hunks = (b"@@ -%d,2 +%d,2 @@\n-a\n+b\n a\n" % (n, n) for n in range(2, 1000))
    (part,) = parse(HEAD + b"".join(hunks), "x.diff")
    with pytest.raises(DiffError, match="places"):
        place(b"a\n" * (MAX_PLACES - 1), part, "m")


def test_a_file_of_a_diff_has_a_limit_of_hunks() -> None:
    hunks = (b"@@ -%d,2 +%d,2 @@\n-a\n+b\n a\n" % (n, n) for n in range(2, MAX_HUNKS + 3))
    with pytest.raises(DiffError, match="too many hunks"):
        parse(HEAD + b"".join(hunks), "x.diff")


def test_an_edit_of_many_hunks_with_many_places_ends(tmp_path: Path) -> None:
    source = "a\n" * (MAX_PLACES - 1)
    tree = make_tree(tmp_path / "t", {"core.py": source})
    hunks = (f"@@ -{n},2 +{n},2 @@\n-a\n+b\n a\n" for n in range(2, MAX_HUNKS))
    text = "--- a/vllm/core.py\n+++ b/vllm/core.py\n" + "".join(hunks)
    fix = make_fix(tmp_path / "f", "a", {"x.diff": text}, edits={"vllm.core": "x.diff"})
    (judged,) = judge([fix], tree)
    assert judged.verdict == "incompatible"
    assert "hunk 506 matches vllm.core in 198 places" in judged.reasons[0]
