"""Run by path in a Python of its own: tells what the installed vLLM's ``serve`` parser knows.

Reads ``{"argv": null}`` or ``{"argv": ["serve", model, ...]}`` from standard input. Writes the
parser's options, or ``{"refused": message}`` if vLLM's own parser or its checks of the parsed
flags refuse ``argv`` (null if they accept it). vLLM logs to standard output, so that goes to
standard error. Only the standard library and vLLM are imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import types
import typing
from typing import Any

# vLLM's parser takes any JSON object here, and hands its keys to this class much later.
LATE_CLASSES = {"speculative_config": "SpeculativeConfig"}
PLAIN_TYPES = {None: "any", str: "str", int: "int", float: "float", json.loads: "json"}
NAMED_TYPES = {
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size-or-auto",
    "union_dict_and_str": "json-or-str",
}


class RefusedError(Exception):
    """What argparse says before it would end the process."""


def serve_parser() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, Any]:
    """Return vLLM's parser, its ``serve`` parser and its ``serve`` command."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    command = cmd_init()[0]
    return parser, command.subparser_init(parser.add_subparsers(dest="subparser")), command


def options(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Return each option of the parser that takes a value or is a switch."""
    # 0.33.0 hides some spellings from an action's own list, so ask the parser for them.
    strings: dict[int, list[str]] = {}
    for string, action in parser._option_string_actions.items():
        strings.setdefault(id(action), []).append(string)
    return [
        option(action, strings[id(action)], parser)
        for action in parser._actions
        if id(action) in strings and action.dest not in ("help", "version")
    ]


def option(
    action: argparse.Action, strings: list[str], parser: argparse.ArgumentParser
) -> dict[str, Any]:
    kind, config = converter(action.type)
    if config is None and action.dest in LATE_CLASSES:
        import vllm.config

        config = getattr(vllm.config, LATE_CLASSES[action.dest], None)
    return {
        "strings": strings,
        "dest": action.dest,
        "truth": {s: truth(action, s, parser) for s in strings} if action.nargs == 0 else None,
        "nargs": action.nargs,
        "bare": action.nargs == "?" and action.const is True,
        "append": isinstance(action, argparse._AppendAction),
        "type": kind,
        "choices": None if action.choices is None else list(action.choices),
        "fields": fields(config, ()),
    }


def truth(action: argparse.Action, string: str, parser: argparse.ArgumentParser) -> bool:
    """Return what a switch sets when it is written as ``string``."""
    namespace = argparse.Namespace()
    action(parser, namespace, [], string)
    return bool(getattr(namespace, action.dest))


def converter(function: Any) -> tuple[str, Any]:
    """Return the name of what a converter of vLLM makes of text, and its config class, if any."""
    if getattr(function, "__hash__", None) and function in PLAIN_TYPES:
        return PLAIN_TYPES[function], None
    name = getattr(function, "__name__", "")
    if name in NAMED_TYPES:
        return NAMED_TYPES[name], None
    if name == "parse_dataclass":
        return "json", function.__defaults__[0]
    if name in ("_optional_type", "_parse_type"):
        inner = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        return converter(inner["return_type"].cell_contents)
    return "other", None


def fields(hint: Any, above: tuple[Any, ...]) -> dict[str, Any] | None:
    """Return the keys that a config class takes, each with its own keys, or None for any."""
    classes = [c for c in candidates(hint) if dataclasses.is_dataclass(c)]
    if len(classes) != 1 or classes[0] in above:
        return None
    cls = classes[0]
    if getattr(cls, "__pydantic_config__", {}).get("extra") != "forbid":
        return None
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # a hint that only type checkers can resolve
        hints = {}
    return {
        field.name: fields(hints.get(field.name), (*above, cls))
        for field in dataclasses.fields(cls)
        if field.init
    }


def candidates(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Annotated):
        return [c for part in typing.get_args(hint) for c in candidates(part)]
    return [hint]


def refusal(argv: list[str]) -> str | None:
    """Return why vLLM's parser, or its checks of the parsed flags, refuse ``argv``."""

    def refuse(_: object, message: str) -> typing.NoReturn:
        raise RefusedError(message)

    parser, serve, command = serve_parser()
    type(parser).error = refuse  # type: ignore[method-assign, assignment]
    for action in serve._actions:
        if action.type is not None:
            action.type = guarded(action.type)
    try:
        command.validate(parser.parse_args(argv))
    except (RefusedError, ValueError, TypeError) as error:
        return str(error)
    return None


def guarded(convert: Any) -> Any:
    """Return the converter such that argparse names the flag whatever it raises.

    vLLM's own may raise KeyError, say for a cudagraph_mode that there is not.
    """

    @functools.wraps(convert, updated=())
    def guard(text: str) -> Any:
        try:
            return convert(text)
        except (argparse.ArgumentTypeError, TypeError, ValueError):
            raise
        except Exception as error:
            raise argparse.ArgumentTypeError(f"{type(error).__name__}: {error}") from error

    return guard


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    argv = json.load(sys.stdin)["argv"]
    import vllm

    answer: dict[str, Any] = {"path": vllm.__path__[0]}
    if argv is None:
        answer["options"] = options(serve_parser()[1])
    else:
        answer["refused"] = refusal(argv)
    json.dump(answer, out)
    out.flush()


if __name__ == "__main__":
    main()
