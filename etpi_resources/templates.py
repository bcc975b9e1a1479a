"""Templates of texts and pages: a name that has no value is an error, and HTML is escaped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape


def templates(folder: Path, **filters: Callable[..., Any]) -> Environment:
    """Return the templates of a folder, `*.jinja`, with these filters."""
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=select_autoescape(["html.jinja"]), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= filters
    return environment
