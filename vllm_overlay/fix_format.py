"""The YAML of a fix: the keys of fix.yaml, their types and what they mean."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from vllm_overlay.border import Strict, refuse
from vllm_overlay.recipe_format import (
    INTERNAL_VARIABLES,
    MAX_LENGTH,
    Format,
    Name,
    OneLine,
    Text,
    key,
    release,
    shaped,
    version_range,
)

OFF = "0"  # the value of a flag that turns its fix off

_MODULE = re.compile(r"vllm(\.[A-Za-z_][A-Za-z0-9_]*)+")
_FLAG = re.compile(r"VLLM_[A-Z0-9]+(_[A-Z0-9]+)*")
_DIGEST = re.compile(r"[0-9a-f]{8,128}")
_HOOK = re.compile(r"[^:\s][^:]*\.py:[A-Za-z_][A-Za-z0-9_]*")


def _module(text: str) -> str:
    if len(text) > MAX_LENGTH or not _MODULE.fullmatch(text):
        raise refuse("this is no module of vLLM", expected="a dotted name such as vllm.v1.core")
    return text


def _flag(text: str) -> str:
    if len(text) > MAX_LENGTH or not _FLAG.fullmatch(text):
        raise refuse("this is no flag of a fix", expected="upper case that begins with VLLM_")
    if text in INTERNAL_VARIABLES:
        raise refuse(f"the flag '{text}' is a variable of vllm-overlay", remedy="rename it")
    return text


def _digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise refuse("this is no digest", expected="hexadecimal digits in lower case")
    return text


def _hook(text: str) -> str:
    if not _HOOK.fullmatch(text):
        raise refuse("this is no hook", expected="file.py:function")
    return text


def _flag_by_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


def _scalar(value: object) -> object:
    """Let text, whole numbers and true/false through: a serve flag may be any of them."""
    if isinstance(value, bool | int | str):
        return value
    raise refuse("this is no value of a flag", expected="text, a whole number, or true or false")


Module = Annotated[str, AfterValidator(_module), shaped(_MODULE)]
HookPath = Annotated[str, AfterValidator(_hook), shaped(_HOOK)]
FlagName = Annotated[str, AfterValidator(_flag), shaped(_FLAG)]
Release = Annotated[str, AfterValidator(release)]
Digest = Annotated[str, AfterValidator(_digest), shaped(_DIGEST)]
Digests = dict[Release, dict[Module, dict[Text, Digest]]]
FlagValue = Annotated[str, StringConstraints(min_length=1, max_length=MAX_LENGTH)]
NeedValue = Annotated[bool | int | str, BeforeValidator(_scalar)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class FlagModel(Strict):
    """The environment switch of a fix; ``flag: VLLM_X`` is short for ``flag: {name: VLLM_X}``."""

    name: FlagName = key("the environment variable")
    values: list[FlagValue] = key(
        'the values it may have; "0" turns the fix off', default=[OFF, "1"], min_length=2
    )
    default: FlagValue = key("the value when a recipe lists the fix", default="1")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if OFF not in self.values:
            raise refuse("the flag's values lack the one that turns the fix off", expected='"0"')
        if len(set(self.values)) != len(self.values):
            raise refuse("the flag has a value twice", remedy="remove one of them")
        if self.default == OFF or self.default not in self.values:
            others = ", ".join(value for value in self.values if value != OFF)
            raise refuse("the flag's default is none of its on-values", expected=others)
        return self


class NeedModel(Strict):
    """A rule for the recipe: a flag, a variable, a value of the model's config, or room."""

    serve: Text = key("the serve flag; a.b for the key b of a flag that is a map", default="")
    env: Text = key("the environment variable", default="")
    config: Text = key(
        "the value in the model's config.json; a.b for the key b of a map", default=""
    )
    fits: Literal["states", "one-state"] | None = key(
        "what must fit into the KV cache for max-num-seqs requests of a hybrid model: its states, "
        "or one-state a request if the fix keeps no state for a draft token",
        default=None,
    )
    present: bool | None = key("whether it must be set", default=None)
    one_of: list[NeedValue] = key("the values it may have", default=[], alias="in")
    at_least: Number | None = key("the least number", default=None, alias="at-least")
    at_most: Number | None = key("the greatest number", default=None, alias="at-most")
    power_of_two: bool = key(
        "whether it must be 1, 2, 4, 8 and so on", default=False, alias="power-of-two"
    )
    default: NeedValue | None = key("vLLM's own value when it is not set", default=None)
    when: list[FlagValue] = key(
        'the values of the fix\'s flag for which the rule holds; all but "0" if empty', default=[]
    )
    why: OneLine = key("why the fix needs it")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sum(map(bool, (self.serve, self.env, self.config, self.fits))) != 1:
            raise refuse("a need is about one thing", expected="one of serve, env, config and fits")
        bounded = bool(self.one_of) or self.at_least is not None or self.at_most is not None
        bounded = bounded or self.power_of_two
        asks = bounded or self.present is not None
        if self.fits:
            if asks or self.default is not None:
                raise refuse("a need for room has no value", remedy="keep only fits and why")
            return self
        if not asks:
            expected = "present, in, at-least, at-most or power-of-two"
            raise refuse("the need asks for nothing", expected=expected)
        if self.present is False and (bounded or self.default is not None):
            raise refuse("a need for absence has no value", remedy="keep only present: false")
        return self


class FixModel(Strict):
    """The fix.yaml of a fix."""

    format: Format = key("the version of this format: 1", alias="schema")
    name: Name = key("the fix's name: that of its folder")
    summary: OneLine = key("one line for people")
    source: Text = key("where the fix comes from: a URL or a text")
    flag: Annotated[FlagModel, BeforeValidator(_flag_by_name)] | None = key(
        "the environment switch of the fix", default=None
    )
    vllm: Annotated[str, AfterValidator(version_range)] = key(
        'the releases of vLLM that the fix is for, such as ">=0.32.0,<0.33.0"'
    )
    after: list[Name] = key("the fixes that are applied before this one", default=[])
    modules: dict[Module, Text] = key("new modules of vLLM: name to Python file", default={})
    edits: dict[Module, Text] = key("changed modules: name to unified diff", default={})
    hooks: dict[Module, HookPath] = key(
        "functions called with a module that has run: name to file.py:function", default={}
    )
    needs: list[NeedModel] = key("rules that a recipe with this fix must meet", default=[])
    reviewed: Digests = key(
        "digests of the symbols that the fix was written against: release, module, symbol",
        default={},
    )
    upstreamed: Digests = key(
        "digests that prove that a release carries the fix: release, module, symbol", default={}
    )

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if not (self.modules or self.edits or self.hooks):
            raise refuse("the fix changes nothing", expected="modules, edits or hooks")
        return self
