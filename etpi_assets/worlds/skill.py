"""What scripted policies are good and bad at: probabilities by name, as a spec's `engine.skill` table gives them.

Belongs here: reading and refusing them. Does not belong here: any policy's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True)
class PolicySkill:
    """The base of a skill, whose fields are all probabilities; ValueError names one that is none."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= 1:
                raise ValueError(f"skill.{field.name} = {getattr(self, field.name)}: a probability is between 0 and 1")

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Self:
        """The skill that an `engine.skill` table describes; ValueError names an unknown key and the nearest."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise ValueError(f"engine.skill.{key}: unknown{f', {near[0]}?' if near else ''}; there are {known}")
        return cls(**values)
