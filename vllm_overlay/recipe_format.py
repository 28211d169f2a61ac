"""The recipe's YAML: its keys, their types and what they mean."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from vllm_overlay.border import Strict, refuse
from vllm_overlay.folders import FOLDER_VARIABLES

# Set by `serve` from the plan's cache key, so that no cache is shared between different fixes.
CACHE_VARIABLES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
INTERNAL_VARIABLES = ("VLLM_OVERLAY_PLAN", *FOLDER_VARIABLES)
# Composed by `serve` from the recipe's nodes and from what each node is told.
NODE_FLAGS = ("nnodes", "node-rank", "master-addr", "headless")
NODE_REMEDY = "give the recipe nodes: {count: …}; the rest is composed of NODE_RANK and HEAD_ADDR"
SECRET_FLAGS = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}
MAX_VARIANTS = 64
MAX_NODES = 1024
MAX_LENGTH = 200  # characters of a name or a version

_SECRET = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTHORIZATION)(_ID)?$",
    re.IGNORECASE,
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_VARIANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FLAG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODEL_PART = re.compile(r"[A-Za-z0-9._-]+")
_SIZE = re.compile(r"[0-9]{1,12}(\.[0-9]{1,3})?[KMGT]iB")


def looks_secret(name: str) -> bool:
    """Return whether the name of a variable or a key says that its value is a secret."""
    return _SECRET.search(name) is not None


def is_name(text: str) -> bool:
    """Return whether a text can name a recipe or a fix."""
    return len(text) <= MAX_LENGTH and _NAME.fullmatch(text) is not None


def _name(text: str) -> str:
    if not is_name(text):
        raise refuse("this is no name", expected="letters, digits, '.', '_', '-'")
    return text


def _parent(text: str) -> str:
    if text.startswith("/") or ".." in text.split("/"):
        raise refuse("the parent leads out of the recipe folder", expected="a recipe's name")
    return _name(text)


def _variant_name(text: str) -> str:
    if not _VARIANT.fullmatch(text):
        raise refuse("this is no variant's name", expected="letters, digits, '.', '_', '-'")
    return text


def _one_line(text: str) -> str:
    if not text.strip() or "\n" in text.strip():
        raise refuse("this is not one line of text", expected="one line")
    return text.strip()


def release(text: str) -> str:
    """Return a version in its normal form; refuse what is none."""
    try:
        if len(text) <= MAX_LENGTH:
            return str(Version(text))
    except ValueError:
        pass
    raise refuse("this is no release", expected="a version such as 0.33.0")


def version_range(text: str) -> str:
    """Refuse what is no range of versions."""
    try:
        if len(text) <= MAX_LENGTH and SpecifierSet(text):
            return text
    except ValueError:
        pass
    raise refuse("this is no range", expected="a range such as '>=9.0' or '>=0.32.0,<0.33.0'")


def _size(text: str) -> str:
    if not _SIZE.fullmatch(text):
        raise refuse("this is no size", expected="a size such as 120GiB")
    return text


def _model(text: str) -> str:
    """Refuse what is neither an absolute path, ``org/name`` nor the name of a folder."""
    parts = text.removeprefix("/").removesuffix("/").split("/")
    if ".." in parts or "." in parts:
        raise refuse("the model's path leaves its folder", expected="a path without '.' and '..'")
    absolute = text.startswith("/") and text.isprintable() and all(parts)
    if not absolute and not (len(parts) <= 2 and all(map(_MODEL_PART.fullmatch, parts))):
        raise refuse(
            "this is no model",
            expected="an absolute path, org/name, or the name of a folder in the models folder",
        )
    return text


def _serve_flag(text: str) -> str:
    if text in ("model", "config"):
        remedy = "set the recipe's key 'model'" if text == "model" else "write its flags here"
        raise refuse(f"the serve flag '{text}' has no place in a recipe", remedy=remedy)
    if text in NODE_FLAGS:
        raise refuse(f"the serve flag '{text}' has no place in a recipe", remedy=NODE_REMEDY)
    if text in SECRET_FLAGS:
        remedy = f"set the environment variable {SECRET_FLAGS[text]} where you start the server"
        raise refuse(f"the serve flag '{text}' is a secret", remedy=remedy)
    if not _FLAG.fullmatch(text):
        bare = re.sub(r"[^a-z0-9]+", "-", text.lower()[:100]).strip("-")
        remedy = f"write {bare}" if bare else ""
        if "." in text:
            remedy = f"write it as a map under {text.partition('.')[0][:100].strip('-')}"
        expected = "a flag of vllm serve in lower case with hyphens, without the leading --"
        raise refuse("this is no serve flag", expected=expected, remedy=remedy)
    return text


def _env_name(text: str) -> str:
    if not _ENV.fullmatch(text):
        raise refuse("this is no environment variable", expected="letters, digits and '_'")
    if looks_secret(text):
        remedy = f"set {text} in the environment where you start the server"
        raise refuse(f"the variable '{text}' looks like a secret", remedy=remedy)
    if text in CACHE_VARIABLES or text in INTERNAL_VARIABLES:
        raise refuse(f"the variable '{text}' is set by vllm-overlay", remedy="remove it")
    return text


def _whole(value: object) -> object:
    if type(value) is not int:  # to Python, and so to Literal, true and 1.0 are 1
        raise refuse("the version of the format is a whole number", expected="1")
    return value


def shaped(pattern: re.Pattern[str]) -> Any:
    """Return what shows an editor the pattern that a validator checks."""
    return Field(json_schema_extra={"pattern": f"^({pattern.pattern})$"})


Format = Annotated[Literal[1], BeforeValidator(_whole)]
Name = Annotated[str, AfterValidator(_name), shaped(_NAME)]
OneLine = Annotated[str, AfterValidator(_one_line)]
Text = Annotated[str, Field(min_length=1)]
Size = Annotated[str, AfterValidator(_size), shaped(_SIZE)]
Variant = Annotated[str, AfterValidator(_variant_name), shaped(_VARIANT)]
ServeFlags = dict[Annotated[str, AfterValidator(_serve_flag), shaped(_FLAG)], JsonValue]
Environment = dict[Annotated[str, AfterValidator(_env_name), shaped(_ENV)], str]


def key(text: str, *, default: Any = ..., alias: str | None = None, **limits: Any) -> Any:
    """Return a field with the text that the schema and KNOBS.md show."""
    return Field(default, description=text, alias=alias, **limits)


class RequiresModel(Strict):
    """What the host must have."""

    gpus: int = key("the least number of GPUs", default=0, ge=0)
    compute_capability: Annotated[str, AfterValidator(version_range)] = key(
        "the range of the GPUs' compute capability, such as '>=9.0'",
        default="",
        alias="compute-capability",
    )
    gpu_memory: Size = key(
        "the least memory of each GPU, such as 120GiB", default="", alias="gpu-memory"
    )
    shm: Size = key("the least size of /dev/shm, such as 16GiB", default="")


class NodesModel(Strict):
    """The machines that serve one model together."""

    count: int = key("how many nodes; 1 is the same as none of this", default=1, ge=1, le=MAX_NODES)
    per_node: RequiresModel = key(
        "what each of the nodes must have; wins over requires",
        default=RequiresModel(),
        alias="per-node",
    )


class ExpectModel(Strict):
    """One known answer."""

    prompt: Text = key("the text that the model is asked")
    contains: Text = key("a text that the answer contains")


class SmokeModel(Strict):
    """What the smoke checks ask."""

    expect: list[ExpectModel] = key("known answers of this model", default=[])


class VariantModel(Strict):
    """What a variant changes: merged over the recipe like a child over its parent."""

    summary: OneLine = key("one line for people", default="")
    vllm: Annotated[str, AfterValidator(release)] = key(
        'the release of vLLM that this is for, quoted, such as "0.33.0"; needed to serve',
        default="",
    )
    model: Annotated[str, AfterValidator(_model)] = key(
        "an absolute path, org/name of a hub, or a folder's name in the models folder; "
        "needed to serve",
        default="",
    )
    serve: ServeFlags = key("flags of `vllm serve` by their own names", default={})
    env: Environment = key("environment variables of the server, with text values", default={})
    fixes: list[Name] = key("the fixes that are on, by name", default=[])
    requires: RequiresModel = key("what the host must have", default=RequiresModel())
    nodes: NodesModel = key("the machines that serve the model together", default=NodesModel())
    smoke: SmokeModel = key("what the smoke checks ask", default=SmokeModel())


class RecipeModel(VariantModel):
    """One file in recipes/."""

    format: Format = key("the version of this format: 1", alias="schema")
    name: Name = key("the recipe's name")
    extends: Annotated[str, AfterValidator(_parent), shaped(_NAME)] = key(
        "the parent recipe, such as base/h200 for recipes/base/h200.yaml", default=""
    )
    variants: dict[Variant, VariantModel] = key(
        "changes of this recipe, chosen by name when it is served",
        default={},
        max_length=MAX_VARIANTS,
    )
