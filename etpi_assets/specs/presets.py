"""Presets: named values that an experiment's spec takes over with `preset = "name"` (docs/own_data.md).

A preset is `presets/<name>.toml`. It has keys of an experiment; the spec, and the specs that it extends, override them.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from etpi_assets.specs.plugins import near

FOLDER = Path(__file__).resolve().parent / "presets"


@cache
def preset_names() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in FOLDER.glob("*.toml")))


def preset_file(name: str) -> Path:
    """Return the file of a preset.

    Raises ValueError: there is no such preset; names those that resemble it, and all.
    """
    if name not in preset_names():
        names = preset_names()
        raise ValueError(f"there is no preset {name!r}.{near(str(name), names)} The presets are {', '.join(names)}")
    return FOLDER / f"{name}.toml"


def preset_values(name: str) -> dict[str, Any]:
    """Return the values of a preset, as its file nests them. Raises ValueError as `preset_file` does."""
    return tomllib.loads(preset_file(name).read_text(encoding="utf-8"))
