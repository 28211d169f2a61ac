"""Symbols and their digests: what counts, what does not, and the same on every Python."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.pythons import pythons
from vllm_overlay.errors import ConfigError
from vllm_overlay.symbols import MODULE, overlap, read_symbols

ROOT = Path(__file__).resolve().parents[2]

SOURCE = '''
"""Module."""
import os
from . import sibling

LIMIT: int = 8
A, (B, *C) = 1, (2, 3)
TABLE = {"a": 1, **{}}
TABLE["b"] = 2
__all__ = ["f"]
__all__ += ["K"]

if os.name == "posix":
    def g(x): return x + 1
else:
    def g(x): return x - 1

try:
    FAST = sibling.fast
except ImportError:
    FAST = None

@decorate(3)
def f(a, b=1, *, c=None, **rest) -> int:
    """Doc."""
    def inner(y):
        return f"{a}{y!r:>{b}} and {c=}" "x" f"{rest:}"
    class Local:
        z = 1
    match a:
        case [1, *_]: return -1
        case None: pass
    local = 0x10 + 1_000 + 1e3 + 2j
    return inner(b) if (n := local) else lambda: ...

class K(Base, metaclass=Meta):
    """Doc."""
    field: int = 3
    bare: str
    one = two = b"\\xff"
    def method(self):
        self.attr = 1
        del (self.attr)
    async def waits(self):
        async for x in y: yield x
    class Inner:
        value = "\\N{BULLET}\\ud800"
'''


def whole(source: str) -> dict[str, str]:
    return read_symbols(dedent(source).encode(), "m").whole


def test_every_kind_of_symbol_is_seen() -> None:
    assert set(whole(SOURCE)) == {
        MODULE, "LIMIT", "A", "B", "C", "TABLE", "__all__", "g", "FAST", "f", "f.inner",
        "f.Local", "f.Local.z", "K", "K.field", "K.bare", "K.one", "K.two", "K.method",
        "K.waits", "K.Inner", "K.Inner.value",
    }  # fmt: skip


def test_a_digest_never_changes() -> None:
    """Digests are recorded in manifests: another serialization needs another DIGEST_FORM."""
    symbols = whole(SOURCE)
    assert symbols["f"][:16] == "8b1cc280936e0fa5"
    assert symbols["K"][:16] == "5408f2a557a4f37f"
    assert symbols[MODULE][:16] == "8c2785583bcac91b"


@pytest.mark.parametrize("python", pythons(), ids=str)
def test_every_python_gives_the_same(python: Path, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(SOURCE)
    code = """if True:
        import json, sys
        from vllm_overlay.symbols import read_symbols
        print(json.dumps(read_symbols(open(sys.argv[1], "rb").read(), "m").whole))
    """
    out = subprocess.run(
        [python, "-c", code, tmp_path / "m.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True,
    ).stdout  # fmt: skip
    assert json.loads(out) == whole(SOURCE)


BASE = """
    X = 1

    @cached
    def f(a, b=1):
        # comment
        if a > b:
            log("x")
        del a, b
        return a + b

    class K:
        limit = 3
        def m(self, x: int) -> int:
            return x * 2
        def n(self):
            return 1
"""


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("X = 1", "X = 2", {"X"}),
        ("X = 1", "X: int = 1", {"X"}),
        ("@cached", "@cached()", {"f"}),
        ("    @cached\n", "", {"f"}),
        ("b=1", "b=2", {"f"}),
        ("b=1", "b", {"f"}),
        ("a > b", "a >= b", {"f"}),
        ('log("x")', 'log("y")', {"f"}),
        ('log("x")', "pass", {"f"}),
        ("a + b", "a - b", {"f"}),
        ("return a + b", "a + b", {"f"}),
        ("def f(", "async def f(", {"f"}),
        ("class K:", "class K(Base):", {"K"}),
        ("limit = 3", "limit = 4", {"K", "K.limit"}),
        ("x: int", "x: float", {"K", "K.m"}),
        ("x * 2", "x ** 2", {"K", "K.m"}),
        ("x * 2", "x * 2.0", {"K", "K.m"}),
        ("x * 2", "x * True", {"K", "K.m"}),
        ("def n(", "def o(", {"K", "K.n", "K.o"}),
    ],
)
def test_a_change_of_meaning_is_seen(old: str, new: str, changed: set[str]) -> None:
    assert old in BASE
    before, after = whole(BASE), whole(BASE.replace(old, new))
    names = before.keys() | after.keys()
    assert {n for n in names if before.get(n) != after.get(n)} == changed | {MODULE}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# comment", "# another\n\n"),
        ("a > b:", "(a > b):  # why"),
        ('"x"', "'x'"),
        ('"x"', 'u"x"'),
        ("def n(self):", 'def n(self):\n            """Doc."""'),
        ("limit = 3", 'limit = 3\n        """What it is."""'),
        ("limit = 3", "limit = 0x3"),
        ("del a, b", "del (a, b)"),
        ("X = 1", "X = 1  # type: int"),
        ("(a, b=1)", "(\n        a,\n        b=1,\n    )"),
    ],
)
def test_a_change_of_looks_is_not(old: str, new: str) -> None:
    assert old in BASE
    assert whole(BASE) == whole(BASE.replace(old, new))


def test_moved_functions_keep_their_digests() -> None:
    one, two = whole("def f(): 1\ndef g(): 2\n"), whole("def g(): 2\ndef f(): 1\n")
    assert (one["f"], one["g"]) == (two["f"], two["g"])
    assert one[MODULE] != two[MODULE]


def test_the_condition_and_every_definition_count() -> None:
    base = "if fast():\n    def f(): return 1\nelse:\n    def f(): return 2\n"
    for old, new in (("fast()", "slow()"), ("return 1", "return 3"), ("return 2", "return 3")):
        assert whole(base)["f"] != whole(base.replace(old, new))["f"]
    swapped = "if fast():\n    def f(): return 2\nelse:\n    def f(): return 1\n"
    assert whole(base)["f"] != whole(swapped)["f"]
    guarded = "try:\n    X = 1\nexcept ImportError:\n    X = 2\n"
    assert whole(guarded)["X"] != whole(guarded.replace("ImportError", "OSError"))["X"]


def test_own_digests_leave_out_what_is_inside() -> None:
    before = read_symbols(dedent(BASE).encode(), "m")
    after = read_symbols(dedent(BASE).replace("x * 2", "x * 3").encode(), "m")
    assert {n for n in before.own if before.own[n] != after.own[n]} == {"K.m"}


def test_overlap() -> None:
    assert overlap("K", "K.m")
    assert overlap("K.m", "K")
    assert overlap(MODULE, "K.m")
    assert not overlap("K.m", "K.n")
    assert not overlap("K", "K2.m")


@pytest.mark.parametrize(
    "source",
    [b"def f(:", b"\0", b"\xff", b"# coding: nonsense\n", b"(" * 300, b"x = " + b"-" * 5000 + b"1"],
)
def test_what_does_not_parse_is_refused(source: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^vllm\.m:.*(parse|nested)"):
        read_symbols(source, "vllm.m")
