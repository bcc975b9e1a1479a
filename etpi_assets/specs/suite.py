"""What a suite's spec may say.

Belongs here: a suite's knobs. Does not belong here: a family's own params (`etpi_assets.tasks`).
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from etpi_assets.specs.section import Section


class SuiteSpec(Section):
    """A set of tasks. `family` names the module of `etpi_assets.tasks` that makes them; `params` are its own knobs."""

    title: str
    family: str
    seed: int = 0
    params: dict[str, Any] = Field(default_factory=dict)
    notes: str = ""
