"""Findings as comparisons, and whether what was measured bears each out.

Belongs here: reading `findings.toml`, the two figures of a comparison, and the verdict. Does not belong here:
measuring, how an interval is made (`scoring.intervals`), or layout (`results`).

A verdict is one of five: "there", the interval of the difference lies on the claimed side of 0, and no training seed
has it the other way round; "not there", no difference of the size that matters is left in the interval, or it lies on
the other side; "undecided at this n"; "not measured", an experiment has not run; "not comparable", a side has no such
figure.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from etpi_assets.scoring.intervals import Estimate, difference, rate, wilson

DECLARED = Path(__file__).parent / "findings.toml"
PROBE, REINFORCED = "probe:", "rl:"
LATE = 0.2
"""The share of reinforcement's steps, the last ones, that its figures are of."""

Rows = Sequence[Mapping[str, Any]]
Table = Literal["metrics", "probes", "rl_samples", "stages"]
Read = Callable[[str, Table], Rows | None]
"""(experiment, table) -> the rows of its current version, of `stages` what sql/reports/solved_paired.sql answers; None
where there is none."""


class Condition(BaseModel):
    """One side of a comparison."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: str
    role: Literal["base", "sft", "rl", "teacher"] = "sft"
    decoding: str = "greedy"

    def __str__(self) -> str:
        return ", ".join((self.experiment, self.role, *([self.decoding] if self.role != "teacher" else [])))


class Finding(BaseModel):
    """A claim: `more` has more of `figure` than `less`. `least`: the smallest difference that matters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: str
    figure: str
    more: Condition
    less: Condition
    least: float = Field(default=0.1, gt=0)


@dataclass(frozen=True)
class Verdict:
    """What became of a finding: its two figures and their difference, where they were measured."""

    finding: Finding
    word: str
    more: Estimate | None = None
    less: Estimate | None = None
    between: Estimate | None = None


def declared(path: Path = DECLARED) -> list[Finding]:
    """The findings of a file, in its order. Raises pydantic.ValidationError for what is none."""
    return [Finding.model_validate(table) for table in tomllib.loads(path.read_text(encoding="utf-8"))["finding"]]


def experiments() -> list[str]:
    """The experiments that the declared findings compare, in their order."""
    return list(dict.fromkeys(side.experiment for f in declared() for side in (f.more, f.less)))


def judge(finding: Finding, read: Read) -> Verdict:
    """The verdict on a finding, from the experiments as they stand."""
    table, name, measured = _figure(finding.figure)
    conditions = finding.more, finding.less
    sides = [read(condition.experiment, table) for condition in conditions]
    if any(rows is None for rows in sides):
        return Verdict(finding, "not measured")
    pooled = [measured(name, condition, rows or ()) for condition, rows in zip(conditions, sides, strict=True)]
    more, less = (by_seed.pop(None, None) for by_seed in pooled)
    if more is None or less is None:
        return Verdict(finding, "not comparable", more, less)
    between = _paired(finding, read) or difference(more, less)
    shared = pooled[0].keys() & pooled[1].keys()
    contrary = any(pooled[0][seed].value < pooled[1][seed].value for seed in shared)
    return Verdict(finding, _word(between, finding.least, contrary), more, less, between)


def _figure(figure: str) -> tuple[Table, str, Callable[[str, Condition, Rows], dict[int | None, Estimate]]]:
    """The table that a figure is in, its name there, and how it is read."""
    if figure.startswith(PROBE):
        return "probes", figure.removeprefix(PROBE), _on_the_way
    if figure.startswith(REINFORCED):
        return "rl_samples", figure.removeprefix(REINFORCED), _at_the_end
    return "metrics", figure, _metric


def _paired(finding: Finding, read: Read) -> Estimate | None:
    """The difference task by task, where a finding compares what two stages of one experiment solve: each task is its
    own control, so the interval leaves out how tasks differ."""
    more, less = finding.more, finding.less
    if finding.figure != "solved" or (more.experiment, more.decoding) != (less.experiment, less.decoding):
        return None
    for row in read(more.experiment, "stages") or ():
        if (row["decoding"], row["before"], row["after"]) == (more.decoding, less.role, more.role) and row["tasks"] > 1:
            return Estimate(row["difference"], row["tasks"], row["tasks"], row["ci_low"], row["ci_high"], "paired")
    return None


def _word(between: Estimate, least: float, contrary: bool) -> str:
    if between.ci_low > 0:
        return "undecided at this n" if contrary else "there"
    if between.ci_high < least:
        return "not there"
    return "undecided at this n"


def _metric(name: str, condition: Condition, rows: Rows) -> dict[int | None, Estimate]:
    """The metric of a condition by training seed, pooled under None."""
    decoding = "as_rolled_out" if condition.role == "teacher" else condition.decoding
    return {
        row["seed"]: Estimate(row["value"], row["n"], row["n"], row["ci_low"], row["ci_high"], row["interval"])
        for row in rows
        if (row["metric"], row["checkpoint_role"], row["decoding"]) == (name, condition.role, decoding)
    }


def _on_the_way(name: str, condition: Condition, rows: Rows) -> dict[int | None, Estimate]:
    """A probe's share on held-out prompts, the mean over the checkpoints of training, by seed and pooled under None.

    Every checkpoint and seed is asked the same prompts, so their number is taken as the effective size.
    """
    found = [r for r in rows if (r["probe"], r["prompt_set"], r["role"]) == (name, "heldout", condition.role)]
    found = [row for row in found if row["step"] is not None]
    seeds: set[int | None] = {row["seed"] for row in found}
    estimates = {}
    for seed in [*seeds, *([None] if seeds else [])]:
        mine = [row for row in found if seed is None or row["seed"] == seed]
        n = min(row["n"] for row in mine)
        value = math.fsum(row["value"] for row in mine) / len(mine)
        estimates[seed] = Estimate(value, n, n, *wilson(value * n, n), "wilson_clustered")
    return estimates


def _at_the_end(name: str, condition: Condition, rows: Rows) -> dict[int | None, Estimate]:
    """The share of attempts of the last steps of reinforcement, by seed and pooled under None; nothing of a condition
    that was not reinforced."""
    if not rows or condition.role != "rl":
        return {}
    begins = (1 - LATE) * (1 + max(row["step"] for row in rows))
    late = [row for row in rows if row["step"] >= begins and row[name] is not None]
    estimates: dict[int | None, Estimate] = {}
    for seed in (None, *{row["seed"] for row in late}):
        mine = [row for row in late if seed is None or row["seed"] == seed]
        if estimate := rate([row[name] for row in mine], [row["task_id"] for row in mine]):
            estimates[seed] = estimate
    return estimates
