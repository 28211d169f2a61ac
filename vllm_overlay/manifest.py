"""Writing fix.yaml: a new one, and digests into one that a person has written.

Only the lines of ``reviewed`` change; comments, order and style of all else stay.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from vllm_overlay.border import validate
from vllm_overlay.errors import ConfigError
from vllm_overlay.files import read_bytes
from vllm_overlay.fix_format import FixModel
from vllm_overlay.scalars import read_scalar
from vllm_overlay.yamlio import parse

Entry = Mapping[str, Mapping[str, str]]  # module, symbol: digest

STEP = 2  # spaces of indentation
_PLAIN = re.compile(r"[A-Za-z_](?:[A-Za-z0-9_ .,;()'/+-]*[A-Za-z0-9_.)])?|[0-9a-f]{64}")


def scalar(text: str) -> str:
    """Return text as YAML that every reader takes for this text, quoted only if it must be."""
    if _PLAIN.fullmatch(text) and read_scalar(text) == (text, None):
        return text
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable() and not 0xD800 <= ord(character) <= 0xDFFF:
        return character
    return f"\\U{ord(character):08x}"


def new(name: str, flag: str, release: str, facts: Mapping[str, object]) -> str:
    """Return the manifest of a new fix for one release, with the further keys ``facts``."""
    first = {key: facts[key] for key in ("summary", "source")}
    rest = {key: value for key, value in facts.items() if key not in first}
    keys = {"name": name, **first, "flag": flag, "vllm": f"=={release}", **rest}
    return "schema: 1\n" + block(keys)


def record(file: Path, release: str, entry: Entry) -> None:
    """Write the digests of one release into a manifest that has been loaded, whole or not at all.

    Raises ConfigError if the file cannot be written, or if its style cannot be kept.
    """
    before = read_bytes(file)
    after = with_reviewed(before.decode("utf-8"), release, entry).encode("utf-8")
    if _meaning(after, file) != _expected(before, file, release, entry):
        raise ConfigError(
            "the digests cannot be written without changing other lines", file=file,
            expected="'reviewed' as a block: release, module and symbol each on a line",
        )  # fmt: skip
    _replace(file.resolve(), after)


def with_reviewed(text: str, release: str, entry: Entry) -> str:
    """Return a manifest's text with the digests of one release; other releases are kept."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
    finally:
        loader.dispose()
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        return text  # `record` sees that nothing was written
    node = _child(root, "reviewed")
    if node is None:
        return _lines_added(text, len(text), block({"reviewed": {release: entry}}))
    if isinstance(node, yaml.MappingNode) and _flows(node):
        everything = _plain(node)
        key = _same_release(everything, release)
        everything[key] = _merged(everything.get(key, {}), entry)
        lines = block(everything, STEP).removesuffix("\n")
        start = node.start_mark.index
        start, gap = (start, "\n") if node.flow_style else (text.rfind("\n", 0, start) + 1, "")
        return text[:start] + gap + lines + text[_end(node) :]
    return _in_place(text, node, release, entry)


def _in_place(text: str, reviewed: yaml.Node, release: str, entry: Entry) -> str:
    """Change the digests that differ where they stand, and add lines for what is new."""
    key = _same_release(_plain(reviewed), release)
    known = _child(reviewed, key)
    if known is None:
        return _after(text, reviewed, {release: entry})
    edits: list[tuple[yaml.Node, str | dict[str, object]]] = []
    new: dict[str, object] = {}
    for module, symbols in entry.items():
        place = _child(known, module)
        if place is None:
            new[module] = symbols
            continue
        added: dict[str, object] = {}
        for symbol, digest in symbols.items():
            value = _child(place, symbol)
            if value is None:
                added[symbol] = digest
            elif isinstance(value, yaml.ScalarNode) and value.value != digest:
                edits.append((value, scalar(digest)))
        if added:
            edits.append((place, added))
    if new:
        edits.append((known, new))
    # From the end on, so that the places before stay; a map's lines go behind its last value.
    for node, change in sorted(edits, key=lambda edit: _end(edit[0]), reverse=True):
        if isinstance(change, str):
            text = text[: node.start_mark.index] + change + text[node.end_mark.index :]
        else:
            text = _after(text, node, change)
    return text


def _after(text: str, mapping: yaml.Node, more: Mapping[str, object]) -> str:
    """Return the text with more keys behind the last value of a block map."""
    indent = mapping.value[0][0].start_mark.column
    line_end = text.find("\n", _end(mapping))
    return _lines_added(text, len(text) if line_end < 0 else line_end + 1, block(more, indent))


def _lines_added(text: str, at: int, lines: str) -> str:
    gap = "" if at == 0 or text[at - 1] == "\n" else "\n"
    return text[:at] + gap + lines + text[at:]


def _end(node: yaml.Node) -> int:
    """Return where a value's last scalar ends: the mark of a block map lies behind comments."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _end(node.value[-1][1])
    return int(node.end_mark.index)


def block(data: Mapping[str, object], indent: int = 0) -> str:
    """Return maps of text as lines of YAML."""
    text = ""
    for key, value in data.items():
        head = f"{' ' * indent}{_key(key)}:"
        if isinstance(value, Mapping):
            text += f"{head}\n{block(value, indent + STEP)}"
        else:
            text += f"{head} {scalar(str(value))}\n"
    return text


def _key(key: str) -> str:
    """Return a map's key as YAML; a release in quotes, as 0.32 would be a number."""
    return f'"{key}"' if key[:1].isdigit() else scalar(key)


def _child(node: yaml.Node, key: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        return next((value for name, value in node.value if name.value == key), None)
    return None


def _flows(node: yaml.Node) -> bool:
    if not isinstance(node, yaml.MappingNode):
        return False
    return bool(node.flow_style) or any(_flows(value) for _, value in node.value)


def _plain(node: yaml.Node) -> dict[str, Any]:
    return {
        key.value: _plain(value) if isinstance(value, yaml.MappingNode) else value.value
        for key, value in node.value
    }


def _same_release(known: Mapping[str, object], release: str) -> str:
    return next((key for key in known if Version(key) == Version(release)), release)


def _meaning(data: bytes, file: Path) -> dict[str, Any] | None:
    root, errors = parse(data, file)
    model, problems = validate(FixModel, root) if root else (None, [])
    return model.model_dump() if model and not errors and not problems else None


def _expected(data: bytes, file: Path, release: str, entry: Entry) -> dict[str, Any] | None:
    meaning = _meaning(data, file)
    if meaning is None:
        return None
    reviewed: dict[str, Entry] = meaning["reviewed"]
    key = _same_release(reviewed, release)
    return {**meaning, "reviewed": {**reviewed, key: _merged(reviewed.get(key, {}), entry)}}


def _merged(old: Entry, new: Entry) -> Entry:
    return {module: {**old.get(module, {}), **new.get(module, {})} for module in {**old, **new}}


def _replace(file: Path, data: bytes) -> None:
    try:
        handle, scratch = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            Path(scratch).chmod(file.stat().st_mode & 0o7777)
            Path(scratch).replace(file)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"this cannot be written: {error.strerror}", file=file) from None
