"""docs/reference/presets.md: every key that a preset sets, from the presets' files and the pydantic models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from etpi.reference.markdown import code, prose, table
from etpi.reference.specs import default_of, toml_value
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import inner_section
from etpi_assets.specs.presets import preset_file, preset_names, preset_values

_HEAD = """# Presets

`preset = "NAME"` in an experiment's spec takes over these values. The spec, and the specs that it extends, replace them
key by key; `gates.teacher = {}` empties a table. Without a preset, the defaults of [specs.md](specs.md) apply.
[presets.md](../own_data.md#presets) says when to use which.
"""


def page() -> str:
    """Return the page."""
    lines = [_HEAD]
    for name in preset_names():
        rows = [
            [code(key), code(toml_value(value)), code(default_of(field)), prose(field.description or "")]
            for key, value, field in preset_keys(name)
        ]
        lines += [f"## {name}", "", _comment(name), "", *table(["Key", "Value", "Default", "Meaning"], rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def preset_keys(name: str) -> Iterator[tuple[str, Any, FieldInfo]]:
    """Yield (dotted key, value, field) of every key that a preset sets."""

    def walk(values: Mapping[str, Any], model: type[BaseModel], path: str) -> Iterator[tuple[str, Any, FieldInfo]]:
        for key, value in values.items():
            field = model.model_fields[key]
            inner = inner_section(field.annotation)
            if inner and isinstance(value, Mapping):
                yield from walk(value, inner, f"{path}{key}.")
            else:
                yield f"{path}{key}", value, field

    yield from walk(preset_values(name), ExperimentSpec, "")


def _comment(name: str) -> str:
    """Return the comment at the head of a preset's file."""
    lines = preset_file(name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
