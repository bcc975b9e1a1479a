"""The outcome of a check, which every stage returns and the lake records.

The checks themselves are plain functions beside the transform whose result they check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etpi_resources.errors import ExpectedError


class BadData(ExpectedError, RuntimeError):
    """Data that cannot be processed; the message names the row and the remedy."""


def listed(counts: Mapping[Any, Any]) -> str:
    """Return counts as words of a message: "proposer 12, responder 11"; "none" if there are none."""
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def percent(share: float, digits: int = 0) -> str:
    """Return a share as a message and a report write it: "50 %"."""
    return f"{100 * share:.{digits}f} %"


@dataclass(frozen=True)
class CheckOutcome:
    """One check's verdict.

    Attributes:
        name: the check's name, a valid Dagster check name (`[A-Za-z0-9_]+`).
        passed: whether the data passed.
        message: one or two sentences; for a failure: what is wrong, where, and how to fix it.
        blocking: if it fails, the version does not become `current` and no downstream asset runs.
        applicable: False if there was nothing to decide: no bound is set, or the data have nothing that it measures.
            Such a check counts as passed, but every display says so.
        figures: the numbers behind the verdict (JSON-serialisable).
        overridden: {"reason", "passed"} if the spec accepts a failed check: why, and the verdict before.
    """

    name: str
    passed: bool
    message: str
    blocking: bool = True
    figures: Mapping[str, Any] = field(default_factory=dict)
    applicable: bool = True
    overridden: Mapping[str, Any] | None = None

    @classmethod
    def not_applicable(cls, name: str, reason: str, figures: Mapping[str, Any] | None = None) -> CheckOutcome:
        """Return the outcome of a check that has nothing to decide; the reason is a sentence."""
        return cls(name, True, f"Not applicable: {reason}", figures=figures or {}, applicable=False)

    def to_json(self) -> dict[str, Any]:
        """Return the fields; `applicable` only where it is false, `overridden` only where it is set."""
        value = {**vars(self), "figures": dict(self.figures)}
        if self.applicable:
            del value["applicable"]
        if not self.overridden:
            del value["overridden"]
        return value


def shown(check: Mapping[str, Any]) -> str:
    """Return the message of a manifest's check for people, with the reason if the spec overrides it."""
    overridden = check.get("overridden")
    return f"overridden: {overridden['reason']} ({check['message']})" if overridden else check["message"]
