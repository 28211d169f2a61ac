"""The file border: a YAML document becomes a pydantic model, or every reason why not."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from vllm_overlay.errors import ConfigError, did_you_mean, raise_all
from vllm_overlay.yamlio import Node, describe, shorten

MAX_ERRORS = 20  # shown at once: more help nobody
MAX_DETAILS = 500  # looked at: each may cost a search for the nearest name
MAX_NAME = 100  # characters: the nearest name is searched only for what may be a name
KEY = "[key]"  # pydantic's step for the key of a map

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """A map of a file: types are never converted, and unknown keys are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def refuse(what: str, *, expected: str = "", remedy: str = "") -> PydanticCustomError:
    """Return the error for a validator to raise; place and finding are added at the border."""
    context = {"what": what, "expected": expected, "remedy": remedy}
    return PydanticCustomError("refused", "{what}", context)


def validate(model: type[Model], root: Node) -> tuple[Model | None, list[ConfigError]]:
    """Return the model of a document, or None and its errors (the first ``MAX_DETAILS``)."""
    try:
        return model.model_validate(root.plain()), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    translated = (_translate(detail, model, root) for detail in details[:MAX_DETAILS])
    return None, [error for error in translated if error is not None]


def raise_problems(errors: Sequence[ConfigError], file: Path) -> None:
    """Raise the errors in the order of their places, at most ``MAX_ERRORS``; nothing if none."""
    unique = {str(error): error for error in errors}.values()
    ordered = sorted(unique, key=lambda e: (str(e.file), e.line or 0, e.column or 0))
    if len(ordered) > MAX_ERRORS:
        ordered = [*ordered[:MAX_ERRORS], ConfigError("there are more errors", file=file)]
    raise_all(ordered)


def suggest(name: str, known: Sequence[str]) -> str | None:
    """Return ``did you mean …?``, or else the known names if they are few."""
    close = did_you_mean(name, known) if len(name) <= MAX_NAME else None
    if close or not known:
        return close
    return f"known: {', '.join(sorted(known))}" if len(known) <= 20 else None


def _walk(root: Node, path: Sequence[str | int]) -> tuple[list[Node], bool]:
    """Return the nodes from the root along ``path``, and whether it was found to its end."""
    way = [root]
    for step in path:
        child = way[-1].child(step)
        if child is None:
            return way, False
        way.append(child)
    return way, True


def _translate(detail: ErrorDetails, model: type[BaseModel], root: Node) -> ConfigError | None:
    """Return pydantic's error in our words; None if its value has an error already."""
    kind, context = detail["type"], detail.get("ctx", {})
    path = list(detail["loc"])
    of_key = path[-1:] == [KEY] and kind != "extra_forbidden"
    if of_key:
        del path[-1]
    way, complete = _walk(root, path)
    if any(node.bad for node in way):
        return None
    node = way[-1]
    name = str(path[-1]) if path else ""
    parent = way[-2] if complete and len(way) > 1 else node
    if kind == "extra_forbidden":
        known = sorted(_fields(_annotation(model, path[:-1])))
        where = f" in '{_label(path[:-1])}'" if path[:-1] else ""
        what = f"unknown key '{shorten(name)}'{where}"
        return parent.keys[name].error(what, remedy=suggest(name, known))
    if kind == "missing":
        field = _fields(_annotation(model, path[:-1])).get(name)
        where = f" in '{_label(path[:-1])}'" if path[:-1] else ""
        expected = field.description if field else None
        return node.place.error(f"the key '{name}' is missing{where}", expected=expected)
    place = parent.keys[name] if of_key and name in parent.keys else node.place
    found = None if of_key else describe(node)
    if kind == "refused":
        whole = isinstance(node.value, dict)  # a rule about several keys of a map
        return place.error(
            context["what"],
            found=None if whole else found,
            expected=context["expected"] or None,
            remedy=context["remedy"] or None,
        )
    expected, remedy = _EXPECTED.get(kind, ("another value", _no_remedy))
    return place.error(
        f"wrong {'type' if kind.endswith('_type') else 'value'} of '{_label(path)}'",
        found=found,
        expected=expected.format(**context),
        remedy=remedy(node),
    )


def _label(path: Sequence[str | int]) -> str:
    return shorten(".".join(str(step) for step in path)) or "the document"


def _annotation(model: Any, path: Sequence[str | int]) -> Any:
    """Return the type that the model gives to what stands at ``path``; None if it has none."""
    for step in path:
        model = _bare(model)
        if isinstance(model, type) and issubclass(model, BaseModel):
            field = _fields(model).get(str(step))
            model = field.annotation if field else None
        else:
            arguments = typing.get_args(model)
            model = arguments[-1] if arguments else None
    return _bare(model)


def _bare(annotation: Any) -> Any:
    """Return an annotation without ``Annotated`` and ``| None``."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _bare(typing.get_args(annotation)[0])
    if origin in (typing.Union, UnionType):
        return _bare(next(a for a in typing.get_args(annotation) if a is not NoneType))
    return annotation


def _fields(model: Any) -> dict[str, FieldInfo]:
    """Return the fields of a model by the name that they have in a file."""
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return {}
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _no_remedy(node: Node) -> str | None:
    return None


def _quote(node: Node) -> str | None:
    """Return how to make text of a scalar that YAML reads as something else."""
    if isinstance(node.value, bool | int | float):
        return f'quote it: "{shorten(node.written)}"'
    return None


def _unquote(node: Node) -> str | None:
    return f"write {shorten(node.written)} without quotes" if node.quoted else None


def _list(node: Node) -> str | None:
    """Return how to make a list of a scalar."""
    if node.value is None:
        return "write [] for an empty list"
    if isinstance(node.value, dict):
        return None
    if node.written.startswith("+"):
        return "write +[...] without quotes and without a space"
    return f"write [{shorten(node.written)}]"


_EXPECTED = {
    "string_type": ("text", _quote),
    "int_type": ("a whole number", _unquote),
    "float_type": ("a number", _unquote),
    "bool_type": ("true or false", _unquote),
    "list_type": ("a list", _list),
    "dict_type": ("a map", _no_remedy),
    "model_type": ("a map", _no_remedy),
    "literal_error": ("{expected}", _no_remedy),
    "greater_than_equal": ("at least {ge}", _no_remedy),
    "string_too_short": ("a text that is not empty", _no_remedy),
    "too_short": ("at least {min_length} of them", _no_remedy),
    "too_long": ("at most {max_length} of them", _no_remedy),
}
