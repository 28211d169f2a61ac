"""Strict YAML: what is read, what is refused, and where each refusal points."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_overlay.errors import ConfigError
from vllm_overlay.files import MAX_BYTES, inside, read_bytes
from vllm_overlay.yamlio import Node, Places, parse

FILE = Path("x.yaml")


def read(text: str | bytes) -> tuple[Node | None, list[str]]:
    data = text.encode() if isinstance(text, str) else text
    root, errors = parse(data, FILE)
    return root, [str(error) for error in errors]


def test_reads_what_both_yaml_versions_agree_on() -> None:
    text = """\
# a comment
text: some text
quoted: "0.33"
folded: >
  a
  b
int: 12
negative: -3
hex: 0x1F
float: 0.30
truth: true
nothing: ~
l: [1, {a: b}]
"""
    root, errors = read(text)
    assert errors == []
    assert root is not None
    assert root.plain() == {
        "text": "some text",
        "quoted": "0.33",
        "folded": "a b\n",
        "int": 12,
        "negative": -3,
        "hex": 31,
        "float": 0.3,
        "truth": True,
        "nothing": None,
        "l": [1, {"a": "b"}],
    }


def test_places_are_those_an_editor_shows() -> None:
    root, _ = read("a: 1\nserve:\n  port: 8000\n  list: [x, y]\n")
    assert root is not None
    places = Places(root)

    def at(*path: str | int) -> tuple[int, int]:
        place = places.at(*path)
        return place.line, place.column

    assert at() == (1, 1)
    assert at("serve", "port") == (3, 3)
    assert at("serve", "list", 1) == (4, 13)
    assert at("serve", "absent", "deeper") == (2, 1)
    assert at("serve", "list", 7) == (4, 3)
    assert at("absent") == (1, 1)


@pytest.mark.parametrize(
    ("text", "where", "part"),
    [
        ("a: 1\n\tb: 2\n", "2:1", "a tab"),
        ("a: 1 \t# x\n", "1:6", "a tab"),
        ("a: 1\nb: 2\na: 3\n", "3:1", "the key 'a' is there twice; the first is in line 1"),
        ("a: {b: 1, 'b': 2}\n", "1:11", "the key 'b' is there twice"),
        ("a: &x 1\n", "1:4", "an anchor is not allowed; found &x"),
        ("a: *x\n", "1:4", "an alias is not allowed; found *x"),
        ("a: !!str 1\n", "1:4", "a tag is not allowed; found tag:yaml.org,2002:str"),
        ("a: !x {}\n", "1:4", "a tag is not allowed; found !x"),
        ("a: ! x\n", "1:4", "a tag is not allowed"),
        ("a: !!python/object/apply:os.system [id]\n", "1:4", "a tag is not allowed"),
        ("<<: {a: 1}\n", "1:1", "the merge key << is not allowed"),
        ("a: 1\n---\nb: 2\n", "2:1", "a second YAML document begins here"),
        ("%YAML 1.1\n---\na: 1\n", "1:1", "YAML directives are not allowed"),
        ("%YAML 1." + "9" * 5000 + "\n---\na: 1\n", "1:", "out of range"),
        ("", "1:1", "the file is empty"),
        ("# only a comment\n", "1:1", "the file is empty"),
        ("a: b: c\n", "1:5", "quote a value that contains ': '"),
        ("a: >=9.0\n", "1:5", "quote a value that begins with > or |"),
        ("a: @x\n", "1:4", "quote a value that begins with this character"),
        ("a: [1, 2\n", "2:1", "this is not valid YAML"),
        ("a: 'x\n", "2:1", "close the bracket or quote"),
        ("a:\n  b: 1\n c: 2\n", "3:2", "check the indentation"),
        ("a: 1\r\nb: 2\r\n", "1:5", "Unix line ends"),
        ("\ufeffa: 1\n", "1:1", "a byte order mark"),
        ("a: x\0y\n", "1:5", "a NUL byte"),
        ("a: x\x07\n", "1:5", "the control character U+0007"),
        ("a: x\u2028b: y\n", "1:5", "the control character U+2028"),
        ('a: "\\0"\n', "1:4", "this text cannot be used; found U+0000"),
        ('a: "\\ud800"\n', "1:4", "this text cannot be used; found U+D800"),
        ('a: "\\UFFFFFFFF"\n', "1:", "out of range"),
        ("1: x\n", "1:1", 'a key must be text, not the number 1; quote it: "1"'),
        ("true: x\n", "1:1", "a key must be text, not the truth value true"),
        ("~: x\n", "1:1", "a key must be text, not nothing"),
        ("? [a]\n: x\n", "1:3", "a key must be text, not a list"),
        ("? {a: b}\n: x\n", "1:3", "a key must be text, not a map"),
        ("a: " + "9" * 30 + "\n", "1:4", "this number is out of range"),
        ("a: " + "9" * 5000 + "\n", "1:4", "this number is out of range"),
        ("a: 1.0e+999\n", "1:4", "this number is out of range"),
        ("a: .nan\n", "1:4", "this number is out of range"),
        ("a: -.inf\n", "1:4", "this number is out of range"),
        ("a: " + "[" * 40 + "]" * 40 + "\n", "1:35", "expected up to 32 levels"),
        ("a: [" + "1," * 30_000 + "]\n", "1:", "expected up to 20000 values"),
    ],
)
def test_refuses(text: str, where: str, part: str) -> None:
    _, errors = read(text)
    assert len(errors) == 1
    assert errors[0].startswith(f"x.yaml:{where}")
    assert part in errors[0]
    assert "\n" not in errors[0]


@pytest.mark.parametrize(
    "scalar",
    [
        *("yes", "no", "on", "off", "Yes", "NO", "On", "OFF"),
        *("1_000", "017", "08", "0o17", "0b11", "190:20:30", "1:30", "12e3", "1.0e5", "2026-01-02"),
        *("1_0.5", "-.5", "=", "0x_1F"),
    ],
)
def test_refuses_what_yaml_readers_disagree_on(scalar: str) -> None:
    root, errors = read(f"a: {scalar}\n")
    assert errors[0].startswith(
        f"x.yaml:1:4: YAML readers disagree on what this is; found '{scalar}'"
    )
    assert "quote it" in errors[0]
    root, errors = read(f'a: "{scalar}"\n')
    assert errors == []
    assert root is not None
    assert root.plain() == {"a": scalar}


@pytest.mark.parametrize(
    "scalar", ["0.33.0", "127.0.0.1:8000", "16GiB", "none", "y", "n", "1.2.3-rc1"]
)
def test_text_needs_no_quotes_where_it_is_only_text(scalar: str) -> None:
    root, errors = read(f"a: {scalar}\n")
    assert errors == []
    assert root is not None
    assert root.plain() == {"a": scalar}


def test_bytes_that_are_not_utf8_are_placed() -> None:
    assert read(b"a: 1\nb: \xff\n")[1] == [
        "x.yaml:2:4: the file is not UTF-8; found the byte 0xff; save it as UTF-8"
    ]
    assert "not UTF-8" in read("a: 1\n".encode("utf-16"))[1][0]


def test_every_error_of_a_file_is_found_at_once() -> None:
    _, errors = read("a: &x 1\nb: *x\nc: on\nc: 2\n3: 4\n<<: {}\n")
    assert [error.split(":")[1] for error in errors] == ["1", "2", "3", "4", "5", "6"]


def test_an_alias_bomb_costs_nothing() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    tracemalloc.start()
    _, errors = read("\n".join(lines))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert errors
    assert peak < 16 * 2**20


@pytest.mark.parametrize(
    ("text", "items", "append"),
    [
        ("l: +[a, b]\n", ["a", "b"], True),
        ("l: [a, b]\n", ["a", "b"], False),
        ("l: +[]\n", [], True),
        ("l: +[a,\n    b]\n", ["a", "b"], True),
        ("l:\n  +[a]\n", ["a"], True),
        ("l: +[\"x: y\", 'z # z'] # comment\n", ["x: y", "z # z"], True),
        ("l: +[{prompt: a, contains: b}]\n", [{"prompt": "a", "contains": "b"}], True),
        ("{l: +[a, b]}\n", ["a", "b"], True),
        ("{k: [+[z]], l: +[a, b]}\n", ["a", "b"], True),
    ],
)
def test_plus_marks_a_list_that_is_appended(text: str, items: list[object], append: bool) -> None:
    root, errors = read(text)
    assert errors == []
    assert root is not None
    node = root.child("l")
    assert node is not None
    assert node.plain() == items
    assert node.append is append


@pytest.mark.parametrize("text", ['"+[a]"', "+ [a]", "a+[b]", "+1", "++[a]"])
def test_plus_inside_a_scalar_marks_nothing(text: str) -> None:
    root, _ = read(f"l: {text}\n")
    assert root is not None
    node = root.child("l")
    assert node is not None
    assert not node.append
    assert not isinstance(node.value, tuple)


def test_a_file_is_read_if_it_is_a_regular_one_of_bounded_size(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b"#" * (MAX_BYTES + 1))
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "", "absent", "n" * 300, "nul\0"):
        with pytest.raises(ConfigError, match="there is no such regular file"):
            read_bytes(tmp_path / name)
    with pytest.raises(ConfigError, match="too large; expected at most 256 KiB"):
        read_bytes(big)
    assert "too large" in str(parse(big.read_bytes(), big)[1][0])


def test_a_file_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for method in ("open", "is_file"):
        monkeypatch.setattr(Path, method, denied)
        with pytest.raises(ConfigError, match="x: this cannot be read: Permission denied"):
            read_bytes(tmp_path / "x")


def test_a_path_that_leaves_its_folder_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "in").write_text("")
    (folder / "link").symlink_to(folder / "in")
    (folder / "out").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    assert inside(folder, "in") == folder / "in"
    assert inside(folder, "link") == folder / "link"
    for name in ("../x", "/etc/passwd", "out/x", "in/../../x", "a\0b"):
        assert inside(folder, name) is None


def places_in(node: Node) -> list[tuple[int, int]]:
    found = [(node.place.line, node.place.column)]
    if isinstance(node.value, dict):
        found += [place for child in node.value.values() for place in places_in(child)]
    if isinstance(node.value, tuple):
        found += [place for child in node.value for place in places_in(child)]
    return found


YAMLISH = st.text(alphabet="ab01-+[]{}:,?!&*#|>'\"%@`<=~. \n\t\\x", max_size=200)


@given(st.one_of(st.binary(max_size=300), YAMLISH.map(str.encode)))
@example(b"+[")
@example(b"? +[")
@example(b"- - - - ? : +[a]")
@example(b"'" + b"\\" * 50)
@example(b"%TAG ! x\n---\n")
@example(b"a: |999999999999\n")
def test_any_bytes_end_in_errors_or_a_document(data: bytes) -> None:
    root, errors = parse(data, FILE)
    assert (root is not None) or errors
    for error in errors:
        assert "\n" not in str(error)
    if root is not None:
        lines = data.decode().split("\n")
        assert all(line <= len(lines) + 1 for line, _ in places_in(root))


PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126))
KEY = st.text("abc", min_size=1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | PRINTABLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEY, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(KEY, JSON))
def test_reads_what_pyyaml_writes(value: dict[str, object]) -> None:
    text = yaml.safe_dump(value, default_style=None, width=10_000)
    if "&id" in text:
        return
    root, errors = read(text)
    disagreed = [error for error in errors if "disagree" not in error]
    assert disagreed == []
    if root is not None and not errors:
        assert root.plain() == value
