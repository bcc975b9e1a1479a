"""The reference of checks: what each check catches, and what to do when it fails.

The checks themselves are functions beside the data they judge. Their descriptions are in `checks.toml`, which no
asset's code version covers, so that better words recompute nothing. Dagster's web page and docs/reference/checks.md
show them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from etpi_resources.lake.check_outcome import CheckOutcome


@dataclass(frozen=True)
class CheckInfo:
    """A check of one asset.

    Attributes:
        catches: the faults that fail it.
        remedy: what to do then.
        real: for a blocking check, what a real model of billions of weights, in bfloat16 on a GPU, does there: seen, or
            reasoned; "exact" where weights do not matter.
        answers: the failure of published work that it answers, unless docs/faults.md already names it.
        blocking: whether a failure stops every consumer; otherwise it only warns.
        may_warn: whether it only warns in some cases, although it is blocking; `catches` says in which.
    """

    catches: str
    remedy: str
    real: str = ""
    answers: str = ""
    blocking: bool = True
    may_warn: bool = False

    @property
    def description(self) -> str:
        """The text on Dagster's web page."""
        return f"{self.catches} Remedy: {self.remedy}"


def _read() -> dict[str, dict[str, CheckInfo]]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return {
        asset: {name: CheckInfo(**tables.get(table.get("as_in"), checks)[name]) for name, table in checks.items()}
        for asset, checks in tables.items()
    }


CHECKS: Mapping[str, Mapping[str, CheckInfo]] = _read()
"""Asset -> check -> its description, in the order in which the asset declares them. `as_in` names an asset whose check
of that name is described."""


def is_blocking(asset: str, check: str) -> bool:
    """Return whether a check is declared to stop every consumer when it fails."""
    info = CHECKS.get(asset, {}).get(check)
    return info is None or info.blocking


def undeclared(asset: str, outcomes: Iterable[CheckOutcome]) -> list[str]:
    """Return the failed checks that block although they are declared to warn, or the other way round."""
    infos = CHECKS.get(asset, {})
    return [
        outcome.name
        for outcome in outcomes
        if (info := infos.get(outcome.name))
        and not outcome.passed
        and outcome.blocking != info.blocking
        and not (info.blocking and info.may_warn)
    ]
