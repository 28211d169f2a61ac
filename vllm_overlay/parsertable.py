"""What the serve parser of the installed vLLM knows, asked of vLLM itself once and then cached."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay import infocache
from vllm_overlay.errors import ConfigError
from vllm_overlay.flagvalues import Option
from vllm_overlay.upstream import Tree

DUMP = Path(__file__).with_name("parserdump.py")
DUMP_SECONDS = 600  # importing vLLM takes 10 s; a busy machine with a cold disk takes minutes


@dataclass(frozen=True)
class ParserTable:
    """The options of vLLM's serve parser, by every spelling with its dashes."""

    by_string: Mapping[str, Option]

    def find(self, key: str) -> tuple[Option, str] | None:
        """Return the option that a long name (dashes or underscores) spells, and its string."""
        string = "--" + key.replace("_", "-")
        option = self.by_string.get(string)
        return (option, string) if option else None

    def names(self) -> list[str]:
        return sorted({option.name for option in self.by_string.values()})


def parser_table(tree: Tree, home: Path, environ: Mapping[str, str]) -> ParserTable:
    """Return what the parser of the installed vLLM knows, from the cache or from vLLM itself.

    ``environ`` is what vLLM would be started with: its parser depends on the device.

    Raises ConfigError if vLLM's parser cannot be loaded, or is that of another vLLM than ``tree``.
    """
    file = home / "info" / f"parser-{_cache_key(tree, environ)}.json"
    table = _table(infocache.load(file))
    if table is None:
        answer = _ask_vllm(tree, environ, None)
        table = _table(answer)
        if table is None:
            raise ConfigError("vLLM's serve parser cannot be read", file=tree.root / "vllm")
        infocache.save(file, answer)
    return table


def vllm_refuses(
    argv: Sequence[str], tree: Tree, home: Path, environ: Mapping[str, str]
) -> str | None:
    """Return why vLLM's own parser, and its checks of the parsed flags, refuse ``argv``.

    ``argv`` begins with ``serve MODEL``. Only a yes is cached: a no may depend on a file (such as
    a chat template) that is mended next.
    """
    file = home / "info" / f"argv-{infocache.key(_cache_key(tree, environ), *argv)}.json"
    if infocache.load(file) == {"refused": None}:
        return None
    refused = _ask_vllm(tree, environ, argv)["refused"]
    if refused is None:
        infocache.save(file, {"refused": None})
        return None
    return " ".join(str(refused).split())


def _cache_key(tree: Tree, environ: Mapping[str, str]) -> str:
    # Platform and general plugins may add options, and these two variables choose them.
    chosen = [environ.get(name, "") for name in ("VLLM_TARGET_DEVICE", "VLLM_PLUGINS")]
    identity = infocache.tree_identity(tree.root)
    dump = infocache.digest(DUMP.read_bytes())
    return infocache.key(tree.version, identity, sys.executable, dump, *chosen)


def _table(answer: object) -> ParserTable | None:
    try:
        options = [Option.from_json(item) for item in answer["options"]]  # type: ignore[index]
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    by_string = {string: option for option in options for string in option.strings}
    return ParserTable(by_string) if by_string else None


def _ask_vllm(
    tree: Tree, environ: Mapping[str, str], argv: Sequence[str] | None
) -> dict[str, object]:
    """Run the dump in a Python of its own; it takes as long as importing vLLM does."""
    # Without the plan: the parser is vLLM's own, and nothing is applied while we still resolve.
    child = {k: v for k, v in environ.items() if k != "VLLM_OVERLAY_PLAN"}
    child |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    try:
        run = subprocess.run(
            [sys.executable, "-P", str(DUMP)],
            input=json.dumps({"argv": argv}),
            capture_output=True,
            text=True,
            env=child,
            timeout=DUMP_SECONDS,
            check=False,
        )
        answer: dict[str, object] = json.loads(run.stdout)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"vLLM's serve parser was not there after {DUMP_SECONDS} s", file=tree.root / "vllm"
        ) from error
    except ValueError as error:
        last = (run.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(
            "vLLM's serve parser cannot be loaded",
            file=tree.root / "vllm",
            found=last,
            remedy="'vllm serve --help' shows the whole error",
        ) from error
    used = Path(str(answer.get("path")))
    if used.resolve() != (tree.root / "vllm").resolve():
        raise ConfigError(
            "Python imports another vLLM than the installed one",
            found=used,
            expected=tree.root / "vllm",
            remedy="unset PYTHONPATH",
        )
    return answer
