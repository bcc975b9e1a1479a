"""Definitions that were rewritten and still return the same: code versions keep the digests from before.

A row of `rewritten.toml` holds for exactly one text of a definition: any later edit changes its digest, and then counts
as usual.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

REWRITTEN: Mapping[tuple[str, str], Mapping[str, str]] = {
    **{(name, today): dict(zip([name], before, strict=False)) for name, (today, *before) in _ROWS["rewritten"].items()},
    **{(name, row.pop("today")): row for name, row in _ROWS["replaces"].items()},
}
"""(definition, its digest today) -> {definition: digest} that code versions contain in its place."""
