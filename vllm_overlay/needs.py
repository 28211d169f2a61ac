"""Recipe rules of a fix: checked before the model loads, minutes before vLLM would notice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_overlay.capacity import Capacity, KvMemory, capacity
from vllm_overlay.errors import ConfigError
from vllm_overlay.hybridmodel import hybrid_shape
from vllm_overlay.hybridrank import NotCoveredError
from vllm_overlay.modelconfig import ABSENT, ModelConfig, look_up
from vllm_overlay.yamlio import Place, shorten

SUBJECTS = {
    "serve": ("recipe", "the serve flag"),
    "env": ("recipe", "the environment variable"),
    "config": ("model", "the value"),
}
ONE_STATE = "one-state"


@dataclass(frozen=True)
class Need:
    """One rule: the value ``key`` is set, or is in a range; or (``fits``) what must have room."""

    kind: str  # "serve", "env", "config" or "fits"
    key: str
    present: bool | None
    one_of: tuple[bool | int | str, ...]
    at_least: float | None
    at_most: float | None
    power_of_two: bool
    default: bool | int | str | None
    when: tuple[str, ...]  # values of the fix's flag; empty: whichever
    why: str
    place: Place


@dataclass(frozen=True)
class Subject:
    """What rules look at. ``config`` and ``memory`` are None where nothing tells before the start.

    ``env`` is the whole environment of the server, ``capability`` the GPU's, such as "9.0".
    """

    serve: Mapping[str, Any]
    env: Mapping[str, str]
    config: ModelConfig | None
    memory: KvMemory | None
    capability: str | None


def check_need(name: str, need: Need, subject: Subject) -> ConfigError | str | None:
    """Return why a need of the fix ``name`` is not met, as an error.

    As a text: why only the start can tell whether it is.
    """
    if need.kind == "fits":
        return _check_room(name, need, subject)
    if need.kind == "config" and subject.config is None:
        return _open(name, need.key, "the model's config.json is not on this machine yet")
    value = _value(need, subject)
    if value is ABSENT and need.default is not None:
        value = need.default
    if need.present is False:
        return None if value is ABSENT else _error(name, need, subject, value, "that it is not set")
    if value is ABSENT or not _meets(need, value):
        return _error(name, need, subject, value, _wanted(need))
    return None


def _value(need: Need, subject: Subject) -> object:
    if need.kind == "env":
        return subject.env.get(need.key, ABSENT)
    if need.kind == "serve":
        return look_up(subject.serve, need.key)
    assert subject.config is not None
    return subject.config.get(need.key)


def _meets(need: Need, value: object) -> bool:
    if need.one_of and _text(value) not in map(_text, need.one_of):
        return False
    if need.at_least is None and need.at_most is None and not need.power_of_two:
        return True
    number = _number(value)
    if number is None:
        return False
    low = need.at_least is not None and number < need.at_least
    high = need.at_most is not None and number > need.at_most
    whole = number.is_integer() and number > 0
    odd = need.power_of_two and not (whole and int(number).bit_count() == 1)
    return not (low or high or odd)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def _wanted(need: Need) -> str:
    parts = []
    if need.one_of:
        parts.append("one of " + ", ".join(map(_text, need.one_of)))
    if need.at_least is not None:
        parts.append(f"at least {need.at_least:g}")
    if need.at_most is not None:
        parts.append(f"at most {need.at_most:g}")
    if need.power_of_two:
        parts.append("a power of two")
    return " and ".join(parts) or "that it is set"


def _error(name: str, need: Need, subject: Subject, value: object, expected: str) -> ConfigError:
    whose, kind = SUBJECTS[need.kind]
    where = f" of {subject.config.file}" if need.kind == "config" and subject.config else ""
    return need.place.error(
        f"the {whose} does not meet a need of the fix '{name}': {kind} '{need.key}'{where}",
        found="nothing" if value is ABSENT else f"'{shorten(_text(value))}'",
        expected=expected,
        remedy=f"because {need.why}",
    )


def _open(name: str, what: str, why: str) -> str:
    return f"{name}: '{what}' is checked only at start-up: {why}"


def _check_room(name: str, need: Need, subject: Subject) -> ConfigError | str | None:
    """Check that the states of all requests that may run at once have room."""
    what = f"fits: {need.key}"
    if subject.config is None:
        return _open(name, what, "the model's config.json is not on this machine yet")
    shape = hybrid_shape(subject.config)
    if shape is None:
        return need.place.error(
            f"the model does not meet a need of the fix '{name}': it has states",
            found=f"the model_type {_text(subject.config.get('model_type'))!r} in "
            f"{subject.config.file}",
            expected="a hybrid model with Kimi Delta Attention",
            remedy=f"because {need.why}",
        )
    try:
        result = capacity(
            shape,
            subject.serve,
            recoverssm=need.key == ONE_STATE,
            capability=subject.capability,
            memory=subject.memory,
        )
    except NotCoveredError as reason:
        return _open(name, what, f"the arithmetic does not cover {reason}")
    return _room_error(name, need, result) or (
        None
        if subject.memory
        else _open(name, what, "neither kv-cache-memory-bytes nor the GPU tells the room")
    )


def _room_error(name: str, need: Need, result: Capacity) -> ConfigError | None:
    what = f"the recipe does not meet a need of the fix '{name}'"
    if result.mode == "align" and result.block_tokens < result.window:
        return need.place.error(
            f"{what}: a block of the prefix cache is shorter than a step",
            found=f"blocks of {result.block_tokens} tokens",
            expected=f"at least 1 + num_speculative_tokens, {result.window}",
            remedy=f"because {need.why}",
        )
    fit = result.requests(peak=False)
    if fit is None or fit >= result.wanted:
        return None
    unset = "" if result.max_num_seqs else " (vLLM's least default: max-num-seqs is not set)"
    return need.place.error(
        f"{what}: room for the states of the requests that run at once",
        found=f"room for {fit} ({result.blocks} blocks, {result.blocks_of(peak=False)} a request)",
        expected=f"for {result.wanted}{unset}",
        remedy=f"because {need.why}; set max-num-seqs to at most {fit}, or give more KV memory",
    )
