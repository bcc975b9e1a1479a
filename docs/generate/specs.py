"""docs/reference/specs.md and presets.md: every key of a spec, from the JSON schema of the pydantic models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from docs.generate.markdown import anchor, code, prose, table
from etpi_assets.specs.experiment import preset_file, preset_names
from etpi_assets.specs.folders import FOLDERS
from etpi_assets.specs.load import MODELS

_HEAD = """# Spec keys

A spec is a TOML file `<name>.toml` in `suites`, `rollout_sets` or `experiments`, shipped in `etpi_assets/specs` or in a
folder of your own: `specs` in the working folder, or the folders that `ETPI_SPECS`
names. Subfolders group files; a name occurs once in all folders, so your spec cannot replace a shipped one.
`etpi status` shows each folder and its faults. `extends = "name"` takes over another spec of the same kind; tables
merge key by key, and an empty table empties free keys, as `gates.teacher = {}`. `preset = "name"` takes over a
method's settings ([presets.md](presets.md)). The word `"none"` means "no value" where the type allows it.
An unknown key is an error that names the nearest valid one. The default of a section lists the keys whose defaults
differ there.
"""
_PRESETS = """# Presets

`preset = "NAME"` in an experiment's spec takes over these values. The spec, and the specs that it extends, replace them
key by key; `gates.teacher = {}` empties a table. [specs.md](specs.md) has the meaning of each key, and the default
without a preset; [own_data.md](../own_data.md#presets) says when to use which.
"""
_KINDS = {"suite": "a suite", "rollout_set": "a rollout set", "experiment": "an experiment"}
_TYPES = {"string": "string", "integer": "int", "number": "number", "boolean": "true | false", "null": '"none"'}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}

Schema = Mapping[str, Any]
_SECTIONS: Mapping[str, Schema] = models_json_schema([(model, "validation") for model in MODELS.values()])[1]["$defs"]
"""The JSON schema of every section, by the name of its class."""


def page() -> str:
    """Return the page of spec keys: each section once, where it occurs first."""
    places: dict[str, list[str]] = {}
    for kind, model in MODELS.items():
        for section, path in _places(model.__name__, ""):
            places.setdefault(section, []).append(f"{path} of {_KINDS[kind]}" if path else FOLDERS[kind])
    lines = [_HEAD]
    for section, (first, *others) in places.items():
        heading = f"## {first.replace('_', ' ').capitalize()}" if first in FOLDERS.values() else f"### {first}"
        lines += [heading, "", prose(_SECTIONS[section]["description"]), ""]
        lines += [f"The same keys are in {', '.join(others)}.", ""] if others else []
        lines += _keys(section, {name: anchor(where[0]) for name, where in places.items()})
    text = "\n".join(lines)
    return re.sub(r"docs/(reference/)?(\w+\.md)", lambda m: f"[{m[2]}]({m[2] if m[1] else f'../{m[2]}'})", text)


def presets() -> str:
    """Return the page of presets: their files."""
    lines = [_PRESETS]
    for name in preset_names():
        lines += [f"## {name}", "", "```toml", preset_file(name).read_text(encoding="utf-8").rstrip(), "```", ""]
    return "\n".join(lines)


def _places(section: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield (section, heading in TOML) of a section and of those below it; "" heads the spec itself."""
    yield section, path
    for name, schema in _SECTIONS[section]["properties"].items():
        if inner := _section_of(schema):
            below = f"{path.strip('[]')}.{name}".lstrip(".")
            yield from _places(inner, f"[[{below}]]" if schema.get("type") == "array" else f"[{below}]")


def _section_of(schema: Schema) -> str | None:
    """Return the section that a key holds, or a list of; None for a value."""
    parts = [schema, schema.get("items", {}), *schema.get("anyOf", ())]
    return next((part["$ref"].rpartition("/")[2] for part in parts if "$ref" in part), None)


def _keys(section: str, links: Mapping[str, str]) -> list[str]:
    rows = []
    for name, schema in _SECTIONS[section]["properties"].items():
        default = "required" if name in _SECTIONS[section].get("required", ()) else code(_default(schema))
        inner = _section_of(schema)
        meaning = schema.get("description") or _SECTIONS[inner or section]["description"]
        example = f" Example: {code(_toml(schema['examples'][0]))}." if "examples" in schema else ""
        kind = f"[table]({links[inner]})" if inner else code(_type(schema))
        if inner and "$ref" not in schema:
            others = [_type(part) for part in schema.get("anyOf", ()) if "$ref" not in part]
            kind = f"list of {kind}s" if schema.get("type") == "array" else f"{kind} or {code(' | '.join(others))}"
        rows.append([f"`{name}`", kind, default, prose(meaning) + example])
    return table(["Key", "Type", "Default", "Meaning"], rows)


def _default(schema: Schema) -> str:
    """Return the default of a key as TOML writes it; of a section, the keys whose defaults differ there."""
    value = schema.get("default", {})  # pydantic leaves out empty tables
    if (inner := _section_of(schema)) and isinstance(value, dict):
        defaults = {name: of.get("default", {}) for name, of in _SECTIONS[inner]["properties"].items()}
        value = {name: at for name, at in value.items() if at != defaults.get(name, at)}  # renamed keys have no default
        return _toml(value) if value else ""
    return _toml(value)


def _type(schema: Schema) -> str:
    """Return a type in words, with its choices or bounds."""
    if "anyOf" in schema:
        return " | ".join(map(_type, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " | ".join(map(_toml, schema.get("enum", [schema.get("const")])))
    if schema["type"] == "array":
        items = _type(schema["items"])
        return f"list of ({items})" if " | " in items else f"list of {items}"
    if schema["type"] == "object":
        values = schema["additionalProperties"]
        return "table" if values is True else f"table of {_type(values)}"
    bounds = [f"{sign} {schema[bound]}".removesuffix(".0") for bound, sign in _BOUNDS.items() if bound in schema]
    return f"{_TYPES[schema['type']]} {' and '.join(bounds)}".strip()


def _toml(value: Any) -> str:
    """Return a JSON value as TOML writes it in one line; None is "none"."""
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case str():
            return f"'{value}'" if "\\" in value or '"' in value else f'"{value}"'
        case dict():
            return "{" + ", ".join(f"{key} = {_toml(at)}" for key, at in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case _:
            return str(value).replace("e-0", "e-")
