"""`new-fix`: a fix's folder from a public diff, or a skeleton to write a hook in."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay import difftext, gitdiff, manifest
from vllm_overlay.border import raise_problems
from vllm_overlay.errors import ConfigError, ConfigErrors, UsageError, one_line
from vllm_overlay.files import read_bytes
from vllm_overlay.fix import MANIFEST, MAX_CODE, load_fix
from vllm_overlay.releases import find_tree
from vllm_overlay.review import print_review
from vllm_overlay.reviewed import Review, look
from vllm_overlay.scope import module_of
from vllm_overlay.symbols import MODULE
from vllm_overlay.upstream import Tree
from vllm_overlay.verdict import judge

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
MAX_NAME = 100  # characters
SKELETON = {"module": "vllm.v1.core.sched.utils", "symbol": "check_stop"}
HOOKS = '''"""What this fix changes, and why."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType


def install(module: ModuleType) -> Mapping[str, object]:
    """Return what was put into the module, by dotted name: it is read back there."""
    return {}  # a hook that changes nothing ends the process
'''


@dataclass(frozen=True)
class Made:
    """A new fix. ``left_out`` are the diff's other files, each with what it is; ``review`` is
    what was recorded, None for a skeleton."""

    folder: Path
    edits: tuple[str, ...]
    modules: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    review: Review | None

    def as_dict(self) -> dict[str, Any]:
        """Return what was made as JSON-ready data."""
        return {
            "folder": str(self.folder),
            "edits": list(self.edits),
            "modules": list(self.modules),
            "left_out": [{"path": path, "why": why} for path, why in self.left_out],
            "review": self.review.as_dict() if self.review else None,
        }


def new_fix(name: str, folder: Path, diff: Path | None, vllm: str | None, home: Path) -> Made:
    """Make the fix ``name`` in ``folder`` for a vLLM (as in ``find_tree``), whole or not at all.

    Raises UsageError for a name that is none or taken, ConfigError(s) with every reason why the
    diff is no fix of that vLLM.
    """
    if len(name) > MAX_NAME or not NAME.fullmatch(name):
        expected = f"up to {MAX_NAME} letters a-z and digits, parts joined by '-'"
        raise UsageError("this is no name for a fix", found=repr(name), expected=expected)
    if not folder.is_dir():
        raise UsageError("the folder of fixes is missing", file=folder, expected="a folder")
    if (folder / name).exists() or (folder / name).is_symlink():
        raise UsageError("there is a fix of this name already", file=folder / name)
    tree = find_tree(vllm, home)
    _check_flag(_flag(name), tree)
    if diff is None:
        return _skeleton(name, folder, tree)
    return _from_diff(name, folder, diff, tree, home)


def _flag(name: str) -> str:
    return f"VLLM_{name.upper().replace('-', '_')}"


def _check_flag(flag: str, tree: Tree) -> None:
    envs = tree.source("vllm.envs") or b""
    if f'"{flag}"'.encode() in envs:
        what = f"the fix's flag would be {flag}, which is a variable of vLLM {tree.version}"
        raise UsageError(what, remedy="give the fix another name")


def _skeleton(name: str, folder: Path, tree: Tree) -> Made:
    module, symbol = SKELETON["module"], SKELETON["symbol"]
    facts = {
        "summary": "What a user sees of it, in one line",
        "source": "the pull request, paper or page that it comes from",
        "hooks": {module: "hooks.py:install"},
    }
    text = manifest.new(name, _flag(name), tree.release, facts)
    text += f"# What the hook relies on; `vllm-overlay review {name}` fills in the digests.\n"
    text += manifest.block({"reviewed": {tree.release: {module: {symbol: "00000000"}}}})
    with _workshop(folder, name) as place:
        _write(place, {MANIFEST: text.encode(), "hooks.py": HOOKS.encode()})
        load_fix(place)
        _move(place, folder / name)
    return Made(folder / name, (), (), (), None)


def _from_diff(name: str, folder: Path, diff: Path, tree: Tree, home: Path) -> Made:
    public = gitdiff.read(read_bytes(diff, MAX_CODE), diff.name)
    changes, left_out = difftext.changes(public, tree, diff.name)
    files: dict[str, bytes] = {}
    maps: dict[str, dict[str, str]] = {"modules": {}, "edits": {}}
    expected: dict[str, bytes] = {}
    for change in changes:
        module = module_of(change.path)
        assert module is not None  # scope.refusal
        if change.before is None:
            maps["modules"][module] = change.path
            files[change.path] = change.after
        elif _only_looks(change, module, tree):
            left_out.append((change.path, "changes no code"))
        else:
            file = f"{change.path.removesuffix('.py')}.diff"
            maps["edits"][module] = file
            files[file] = change.diff
            expected[module] = change.after
    if not files:
        what = "the diff changes nothing that a fix could"
        raise ConfigError(what, file=diff.name, found=_listed(left_out))
    facts = {
        "summary": public.subject or one_line(f"Made from {diff.name}"),
        "source": public.url or one_line(diff.name),
        **{kind: entries for kind, entries in maps.items() if entries},
    }
    text = manifest.new(name, _flag(name), tree.release, facts)
    with _workshop(folder, name) as place:
        _write(place, {MANIFEST: text.encode(), **files})
        with _errors_of(diff, place):
            review = _reviewed(place, tree, home, expected)
        _move(place, folder / name)
    edits, modules = tuple(maps["edits"]), tuple(maps["modules"])
    return Made(folder / name, edits, modules, tuple(left_out), review)


def _only_looks(change: difftext.Change, module: str, tree: Tree) -> bool:
    """Return whether a module is the same code before and after: only comments have changed."""
    if change.before is None:
        return False
    before = tree.read(change.before, module).whole[MODULE]
    return before == tree.read(change.after, f"{module} with the diff").whole[MODULE]


def _listed(left_out: list[tuple[str, str]]) -> str:
    shown = ", ".join(f"{path} ({why})" for path, why in left_out[:5])
    return shown + (", …" if len(left_out) > 5 else "")


def _reviewed(place: Path, tree: Tree, home: Path, expected: Mapping[str, bytes]) -> Review | None:
    """Record the digests of what the fix changes, and make sure that it applies."""
    fix = load_fix(place)
    review = None
    if fix.edits:
        review = look([fix], tree, home)
        manifest.record(fix.file, tree.release, review.entry)
    judged = judge([load_fix(place)], tree)[0]
    if judged.verdict != "apply":
        raise ConfigErrors([ConfigError(reason) for reason in judged.reasons])
    if judged.patched != expected:
        raise ConfigError("the fix's edits would not give what the diff gives")
    return review


def print_made(made: Made) -> None:
    """Print what was made of the diff, and what was not."""
    if made.review:
        print_review(made.review)
    for path, why in made.left_out:
        print(one_line(f"left out: {path} ({why})"))
    for kind, modules in (("edit", made.edits), ("module", made.modules)):
        for module in modules:
            print(f"{kind}: {module}")
    print(f"made {made.folder}")


# --- files ---


@contextmanager
def _workshop(folder: Path, name: str) -> Iterator[Path]:
    """Yield a folder ``name`` on the file system of ``folder``; what is left in it vanishes."""
    try:
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=f".{name}."))
    except OSError as error:
        raise ConfigError(
            f"the folder of fixes cannot be written: {error.strerror}", file=folder
        ) from None
    try:
        yield scratch / name
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(place: Path, files: Mapping[str, bytes]) -> None:
    try:
        for name, data in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"this cannot be written: {error.strerror}", file=place) from None


def _move(place: Path, target: Path) -> None:
    try:
        place.rename(target)
    except OSError as error:
        raise ConfigError(f"this cannot be written: {error.strerror}", file=target) from None


@contextmanager
def _errors_of(diff: Path, place: Path) -> Iterator[None]:
    """Let errors name the diff in place of files that will not be there."""
    try:
        yield
    except ConfigErrors as several:
        raise_problems([_renamed(error, diff, place) for error in several.errors], diff)
    except ConfigError as error:
        raise _renamed(error, diff, place) from None


def _renamed(error: ConfigError, diff: Path, place: Path) -> ConfigError:
    file = str(error.file or "")
    where = file.removeprefix(str(place)).strip("/") if file.startswith(str(place)) else ""
    line = f":{error.line}" if where and error.line else ""
    what = f"{where}{line}: {error.what}" if where else error.what
    return ConfigError(what, file=diff.name, found=error.found, expected=error.expected)
