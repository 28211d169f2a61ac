"""Loading a fix: its fix.yaml and a first look at the files that it names."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_overlay.border import raise_problems, suggest, validate
from vllm_overlay.errors import ConfigError, ConfigErrors
from vllm_overlay.files import inside, is_file, read_bytes, unreadable
from vllm_overlay.fix_format import OFF, FixModel, NeedModel
from vllm_overlay.needs import Need, Subject, check_need
from vllm_overlay.yamlio import Node, Place, Places, parse

MANIFEST = "fix.yaml"
MAX_CODE = 4 * 1024 * 1024  # bytes of a Python file or diff

Digests = dict[str, dict[str, dict[str, str]]]  # release, module, symbol: hexadecimal digest


@dataclass(frozen=True)
class Flag:
    """The environment switch of a fix: "0" is off, ``default`` is what a recipe's listing means."""

    name: str
    values: tuple[str, ...]
    default: str


@dataclass(frozen=True)
class Hook:
    """A function of a Python file, called with a module that has just run."""

    file: Path
    function: str


@dataclass(frozen=True)
class Fix:
    """A fix; every path is absolute and inside ``folder``."""

    name: str
    summary: str
    source: str
    flag: Flag | None
    vllm: str  # a range of releases
    after: tuple[str, ...]
    modules: dict[str, Path]
    edits: dict[str, Path]
    hooks: dict[str, Hook]
    needs: tuple[Need, ...]
    reviewed: Digests
    upstreamed: Digests
    folder: Path
    file: Path
    places: Places = field(repr=False)


def load_fixes(folder: Path) -> dict[str, Fix]:
    """Load every fix of a folder by name. Raises ConfigError or ConfigErrors with all reasons."""
    fixes: dict[str, Fix] = {}
    errors: list[ConfigError] = []
    for child in _fix_folders(folder):
        try:
            if inside(folder, child.name) is None:
                raise ConfigError("the fix's folder is a link out of the fixes folder", file=child)
            fixes[child.name] = load_fix(child)
        except ConfigError as error:
            errors.append(error)
        except ConfigErrors as several:
            errors += several.errors
    if not errors:  # else a fix may be unknown only because it is broken
        errors += _unknown_after(fixes)
    errors += _shared_flags(fixes)
    raise_problems(errors, folder)
    return fixes


def load_fix(folder: Path) -> Fix:
    """Load the fix in a folder. Raises ConfigError or ConfigErrors with all reasons."""
    folder = folder.absolute()
    file = folder / MANIFEST
    if not is_file(file):
        what = f"this fix has no {MANIFEST}" if folder.is_dir() else "there is no such fix"
        raise ConfigError(what, file=folder, expected=f"a folder with a {MANIFEST}")
    if inside(folder, MANIFEST) is None:
        raise ConfigError("the file is a link out of the fix's folder", file=file)
    root, errors = parse(read_bytes(file), file)
    if root is None:
        raise_problems(errors, file)
        raise AssertionError("a document without a root has an error")
    model, problems = validate(FixModel, root)
    problems += _appended_lists(root)
    errors += problems
    errors += _wrong_name(root, folder)
    errors += _inconsistent(root)
    errors += _broken_files(root, folder)
    errors += _unknown_values(model, Places(root)) if model else []
    raise_problems(errors, file)
    assert model is not None
    return _fix(model, folder, file, Places(root))


def check_needs(fix: Fix, subject: Subject) -> tuple[list[ConfigError], list[str]]:
    """Return each need of a fix that is not met, and a note on each that only the start can tell.

    A need that is bound to values of the fix's flag holds where the environment sets one of them,
    or sets none and one is the default. Raises ConfigError for a model whose config.json lacks
    what the rules are about.
    """
    value = subject.env.get(fix.flag.name, fix.flag.default) if fix.flag else None
    needs = [need for need in fix.needs if not need.when or value in need.when]
    checked = [check_need(fix.name, need, subject) for need in needs]
    errors = [item for item in checked if isinstance(item, ConfigError)]
    return errors, [item for item in checked if isinstance(item, str)]


def _fix_folders(folder: Path) -> list[Path]:
    """Return the folders in the fixes folder, sorted by name, without hidden ones and caches."""
    try:
        return sorted(
            child
            for child in folder.iterdir()
            if not child.name.startswith((".", "__")) and (child.is_dir() or child.is_symlink())
        )
    except OSError as error:
        raise unreadable(folder, error) from None


def _unknown_after(fixes: Mapping[str, Fix]) -> Iterator[ConfigError]:
    for fix in fixes.values():
        for index, name in enumerate(fix.after):
            if name not in fixes:
                place = fix.places.at("after", index)
                yield place.error(f"there is no fix '{name}'", remedy=suggest(name, list(fixes)))


def _shared_flags(fixes: Mapping[str, Fix]) -> Iterator[ConfigError]:
    owners: dict[str, str] = {}
    for fix in fixes.values():
        if fix.flag is not None:
            owner = owners.setdefault(fix.flag.name, fix.name)
            if owner != fix.name:
                what = f"the flag '{fix.flag.name}' is that of the fix '{owner}' already"
                yield fix.places.at("flag").error(what, remedy="give each fix its own flag")


def _appended_lists(node: Node) -> Iterator[ConfigError]:
    """Refuse ``+[...]``: a fix has no parent."""
    if node.append:
        yield node.place.error("+[...] has no parent's list here", remedy="write [...]")
    children = node.value.values() if isinstance(node.value, dict) else _items(node)
    for child in children:
        yield from _appended_lists(child)


def _wrong_name(root: Node, folder: Path) -> list[ConfigError]:
    node = root.child("name")
    name = _text(node)
    if node is None or not name or name == folder.name:
        return []
    what = "the fix's name differs from its folder's"
    return [node.place.error(what, found=f"'{name[:200]}'", expected=f"'{folder.name}'")]


def _inconsistent(root: Node) -> Iterator[ConfigError]:
    """Yield what contradicts itself although each key is right."""
    new = dict(_entries(root, "modules"))
    for other in ("edits", "hooks"):
        for module, node in _entries(root, other):
            if module in new:
                what = f"the module '{module[:200]}' is new and cannot be in {other} too"
                yield node.place.error(what, remedy="write it into the module itself")
    after = root.child("after")
    names = [item.value for item in _items(after)]
    for index, item in enumerate(_items(after)):
        if item.value in names[:index]:
            yield item.place.error(f"'{item.written[:200]}' is there twice", remedy="remove it")
        elif isinstance(item.value, str) and item.value == _text(root.child("name")):
            yield item.place.error("the fix comes after itself", remedy="remove it")


def _unknown_values(model: FixModel, places: Places) -> Iterator[ConfigError]:
    """Yield each value of the flag that a need is bound to and the flag does not have."""
    values = [value for value in model.flag.values if value != OFF] if model.flag else []
    for number, need in enumerate(model.needs):
        for index, value in enumerate(need.when):
            if value not in values:
                yield places.at("needs", number, "when", index).error(
                    "the need is bound to a value with which the fix's flag does not turn it on",
                    found=f"'{value[:200]}'",
                    expected=" or ".join(values) or "no 'when': the fix has no flag",
                )


def _broken_files(root: Node, folder: Path) -> Iterator[ConfigError]:
    """Yield what is wrong with the files that the manifest names."""
    for kind in ("modules", "edits", "hooks"):
        for _, node in _entries(root, kind):
            text = _text(node)
            if not text or node.bad:
                continue  # the format's own check has reported it
            name, _, function = text.partition(":") if kind == "hooks" else (text, "", "")
            file = inside(folder, name)
            if file is None or Path(name).is_absolute():
                what = f"the file '{name[:200]}' leads out of the fix's folder"
                yield node.place.error(what, expected=f"a file in {folder}")
                continue
            try:
                data = read_bytes(file, MAX_CODE)
                if kind != "edits":
                    _check_python(data, file, function)
            except ConfigError as error:
                if error.line is not None:
                    yield error
                else:  # nothing in the file to point at
                    what = f"{name[:200]}: {error.what}"
                    yield node.place.error(what, expected=error.expected)


def _entries(root: Node, key: str) -> list[tuple[str, Node]]:
    node = root.child(key)
    return list(node.value.items()) if node and isinstance(node.value, dict) else []


def _items(node: Node | None) -> tuple[Node, ...]:
    return node.value if node and isinstance(node.value, tuple) else ()


def _text(node: Node | None) -> str:
    return node.value if node and isinstance(node.value, str) else ""


def _check_python(data: bytes, file: Path, function: str) -> None:
    """Refuse a Python file that does not compile, or that lacks the hook's function."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the file is only looked at here
            tree = ast.parse(data, str(file))
            compile(tree, str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ConfigError(
            f"the file has a syntax error: {error.msg}",
            file=file,
            line=error.lineno or 1,
            column=error.offset or 1,
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        what = f"the file cannot be parsed: {error or 'it is nested too deeply'}"
        raise ConfigError(what, file=file, line=1, column=1) from None
    if function:
        _check_function(tree, file, function)


def _check_function(tree: ast.Module, file: Path, function: str) -> None:
    defined = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    if function not in defined:
        raise ConfigError(
            f"the file has no function '{function}'",
            file=file,
            line=1,
            column=1,
            expected=f"def {function}(module) at the top of the file",
            remedy=suggest(function, list(defined)),
        )
    node = defined[function]
    arguments = node.args
    positional = arguments.posonlyargs + arguments.args
    required = len(positional) - len(arguments.defaults)
    keywords = any(default is None for default in arguments.kw_defaults)
    if keywords or required > 1 or not (positional or arguments.vararg):
        raise ConfigError(
            f"the hook '{function}' cannot be called with one module",
            file=file,
            line=node.lineno,
            column=node.col_offset + 1,
            expected=f"def {function}(module)",
        )


def _fix(model: FixModel, folder: Path, file: Path, places: Places) -> Fix:
    hooks = {module: text.partition(":") for module, text in model.hooks.items()}
    flag = model.flag
    return Fix(
        name=model.name,
        summary=model.summary,
        source=model.source,
        flag=Flag(flag.name, tuple(flag.values), flag.default) if flag else None,
        vllm=model.vllm,
        after=tuple(model.after),
        modules={module: folder / name for module, name in model.modules.items()},
        edits={module: folder / name for module, name in model.edits.items()},
        hooks={module: Hook(folder / name, f) for module, (name, _, f) in hooks.items()},
        needs=tuple(_need(n, places.at("needs", i)) for i, n in enumerate(model.needs)),
        reviewed=model.reviewed,
        upstreamed=model.upstreamed,
        folder=folder,
        file=file,
        places=places,
    )


def _need(model: NeedModel, place: Place) -> Need:
    kind = next(name for name in ("serve", "env", "config", "fits") if getattr(model, name))
    return Need(
        kind=kind,
        key=getattr(model, kind),
        present=model.present,
        one_of=tuple(model.one_of),
        at_least=model.at_least,
        at_most=model.at_most,
        power_of_two=model.power_of_two,
        default=model.default,
        when=tuple(model.when),
        why=model.why,
        place=place,
    )
