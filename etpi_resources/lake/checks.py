"""The outcome of a check: what every stage returns and the lake records.

Belongs here: the value that says whether data may be used. Does not belong here: the checks themselves, which are
plain functions beside the transform they guard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class BadData(RuntimeError):
    """Data that no result can be made of; the message names the row and the remedy."""


@dataclass(frozen=True)
class CheckOutcome:
    """One check's verdict.

    Attributes:
        name: the check's name, a valid Dagster check name (`[A-Za-z0-9_]+`).
        passed: whether the data passed.
        message: one or two sentences; for a failure: what was found, where, and what to do about it.
        blocking: a failed blocking check keeps the version from becoming `current` and stops every consumer.
        figures: the numbers behind the verdict (JSON-serialisable).
    """

    name: str
    passed: bool
    message: str
    blocking: bool = True
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "passed": self.passed,
            "message": self.message,
            "blocking": self.blocking,
            "figures": dict(self.figures),
        }
