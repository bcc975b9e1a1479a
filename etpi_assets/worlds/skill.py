"""The base class of scripted policies' skills: named probabilities from a spec's `engine.skill` table."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True)
class PolicySkill:
    """A skill; all fields of a subclass are probabilities. Raises ValueError for a value outside [0, 1]."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= 1:
                raise ValueError(f"skill.{field.name} = {getattr(self, field.name)}: a probability is between 0 and 1")

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Self:
        """Build the skill of an `engine.skill` table. Raises ValueError with the nearest name for an unknown key."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise ValueError(f"engine.skill.{key}: unknown{f', {near[0]}?' if near else ''}; there are {known}")
        return cls(**values)
