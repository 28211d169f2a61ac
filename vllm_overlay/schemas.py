"""JSON schemas of the two file formats, for editors: ``python -m vllm_overlay.schemas``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vllm_overlay.fix_format import FixModel
from vllm_overlay.recipe_format import RecipeModel

DIALECT = "https://json-schema.org/draft/2020-12/schema"
APPENDED = {"type": "string", "pattern": r"^\+\[", "description": "appended to the parent's list"}
DOCS = Path(__file__).resolve().parent.parent / "docs"


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a recipe. It lets null and ``+[...]`` pass where they are merged."""
    schema = _schema("A recipe of vllm-overlay", RecipeModel)
    definitions = schema["$defs"]
    for owner in (schema, definitions["VariantModel"]):
        properties = owner["properties"]
        _allow_null(properties["env"], "additionalProperties")  # serve lets anything pass
        _allow_appending(properties, "fixes")
    for name in definitions["RequiresModel"]["properties"]:
        _allow_null(definitions["RequiresModel"]["properties"], name)
    _allow_appending(definitions["SmokeModel"]["properties"], "expect")
    return schema


def fix_schema() -> dict[str, Any]:
    """Return the schema of a fix.yaml; a flag may be given by its name alone."""
    schema = _schema("The fix.yaml of a fix of vllm-overlay", FixModel)
    name = schema["$defs"]["FlagModel"]["properties"]["name"]
    schema["properties"]["flag"]["anyOf"] = [{"$ref": "#/$defs/FlagModel"}, name]
    return schema


def files(docs: Path) -> dict[Path, str]:
    """Return what the generated schemas in docs/ must hold."""
    schemas = {"recipe.schema.json": recipe_schema(), "fix.schema.json": fix_schema()}
    return {docs / name: json.dumps(body, indent=2) + "\n" for name, body in schemas.items()}


def _schema(title: str, model: type[BaseModel]) -> dict[str, Any]:
    body = _tidy(model.model_json_schema())
    body.pop("description", None)
    return {"$schema": DIALECT, "title": title, **body}


def _tidy(value: Any, *, names: bool = False) -> Any:
    """Return a schema without titles that repeat keys, without empty defaults, keys closed.

    ``names`` says that the keys of this map are those of a file.
    """
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    if not isinstance(value, dict):
        return value
    tidied = {
        key: _tidy(item, names=key in ("properties", "$defs") and not names)
        for key, item in value.items()
    }
    if names:
        return tidied
    tidied.pop("title", None)
    if not tidied.get("default") or isinstance(tidied["default"], dict):
        tidied.pop("default", None)
    for pattern, item in tidied.pop("patternProperties", {}).items():
        # pydantic says it so; but then a key of another form would pass
        tidied["propertyNames"] = {"pattern": pattern}
        tidied["additionalProperties"] = item
    return tidied


def _allow_null(properties: dict[str, Any], name: str) -> None:
    properties[name] = {"anyOf": [properties[name], {"type": "null"}]}


def _allow_appending(properties: dict[str, Any], name: str) -> None:
    inner = properties[name]
    description = inner.pop("description")
    properties[name] = {"anyOf": [inner, APPENDED], "description": description}


def main() -> None:
    """Write the schemas into the checkout's docs/."""
    for file, text in files(DOCS).items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
