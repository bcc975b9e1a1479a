"""The JSON schema of each kind of spec, by which editors complete and check the keys of its TOML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etpi_assets.specs.experiment import preset_names
from etpi_assets.specs.load import MODELS

FOLDER = ".schemas"
"""The folder below a folder of specs in which `etpi init` writes the schemas."""


def schema(kind: str) -> dict[str, Any]:
    """Return the schema of suite, rollout_set or experiment as TOML has it: "none" is null, and `extends` or a preset
    may give any key."""
    written = _as_toml(MODELS[kind].model_json_schema())
    written["properties"]["extends"] = {"type": "string", "description": "a spec of this kind whose values it takes"}
    if kind == "experiment":
        names = ["none", *preset_names()]
        written["properties"]["preset"] = {"enum": names, "description": "settings of a method (docs/own_data.md)"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **written}


def directive(kind: str) -> str:
    """Return the first line of a spec of a kind, by which an editor finds the schema."""
    return f"#:schema ../{FOLDER}/{kind}.json\n"


def _as_toml(value: Any) -> Any:
    """Return a schema without required keys, with the text "none" for null."""
    if isinstance(value, list):
        return [_as_toml(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("type") == "null":
        return {"const": "none"}
    kept = {name: _as_toml(part) for name, part in value.items() if not (name == "required" and isinstance(part, list))}
    # Free keys and sections alike may be given as "none".
    return kept | ({"anyOf": [{"$ref": kept.pop("$ref")}, {"const": "none"}]} if "$ref" in kept else {})
