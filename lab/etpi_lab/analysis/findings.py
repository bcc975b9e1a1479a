"""The findings of `findings.toml`: claims that compare two conditions, each judged by the measured figures.

A verdict is one of
- "supported": the interval of the difference lies on the claimed side of 0;
- "not supported": the interval contains no difference large enough to matter, or lies on the other side of 0;
- "undecided at this n";
- "not measured": an experiment has not run;
- "not comparable": a side lacks the figure.

The interval is the one over training seeds and tasks where both sides have two seeds or more (a base and a teacher have
none and count as fixed), else the one over tasks: with one seed, nothing is known about seeds.

What three seeds leave undecided may be looked at a second time, with twice as many. Each look then has half of the
error, so that both together err in 5 %.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from etpi_assets.scoring.intervals import Estimate, difference, rate, wilson
from etpi_lab.analysis.over_seeds import Spread, over_seeds_and_tasks
from etpi_lab.analysis.power import designs

UNDECIDED = "undecided at this n"
DECLARED = Path(__file__).parent / "findings.toml"
PROBE, REINFORCED = "probe:", "rl:"
MOST_DOUBLINGS = 5
"""Maximum doublings of the number of tasks in search of a design that decides a finding."""
LOOKS = 2
"""Maximum looks at a finding: a second one, with more seeds, follows if the first leaves it undecided."""
LATE = 0.2
"""The last share of reinforcement's steps, which its figures are computed over."""

Rows = Sequence[Mapping[str, Any]]
Table = Literal["metrics", "probes", "rl_samples", "stages"]
Read = Callable[[str, Table], Rows | None]
"""(experiment, table) -> the rows of its current version, None if there is none.

The rows of "stages" are the result of sql/reports/solved_paired.sql.
"""


class ComparisonSide(BaseModel):
    """One side of a comparison."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: str
    role: Literal["base", "sft", "rl", "teacher"] = "sft"
    decoding: str = "greedy"

    def __str__(self) -> str:
        return ", ".join((self.experiment, self.role, *([self.decoding] if self.role != "teacher" else [])))


class Finding(BaseModel):
    """The claim that `figure` is higher in `more` than in `less`; `least` is the smallest difference that matters.

    `published`: the iterations of the plan-first report that it repeats, `less` their failure and `more` the repair.
    `sweep`: a declared sweep answers how large the difference is and where; judged only on a page that names its
    experiments.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: str
    figure: str
    more: ComparisonSide
    less: ComparisonSide
    least: float = Field(default=0.1, gt=0)
    published: tuple[str, ...] = ()
    sweep: bool = False


@dataclass(frozen=True)
class FindingVerdict:
    """A judged finding, with its two figures and their difference if they were measured.

    Attributes:
        between: the difference with its interval over tasks.
        over_seeds: the difference with its interval over training seeds and tasks; None with one seed.
        spread: the variance components behind it.
    """

    finding: Finding
    word: str
    more: Estimate | None = None
    less: Estimate | None = None
    between: Estimate | None = None
    over_seeds: Estimate | None = None
    spread: Spread | None = None

    def wants(self) -> str:
        """Return the designs that would show the smallest difference that matters; "" unless undecided."""
        return self.designs() if self.word == UNDECIDED else ""

    def designs(self) -> str:
        """Return the designs that would show the smallest difference that matters; "" if nothing was measured."""
        if self.between is None:
            return ""
        if self.spread is None:
            return "two seeds or more, to see how much seeds differ"
        tasks = max(2, self.between.clusters)
        sizes = designs(self.spread, self.finding.least, [tasks * 2**k for k in range(MOST_DOUBLINGS + 1)])
        listed = [f"{size.seeds} seeds on {size.tasks} tasks" for size in islice(sizes, 2)]
        return " or ".join(listed) or f"more than {tasks * 2**MOST_DOUBLINGS} tasks, and more seeds"


def declared(path: Path = DECLARED) -> list[Finding]:
    """Read the findings of a file, in its order; raises pydantic.ValidationError for a malformed one."""
    return [Finding.model_validate(table) for table in tomllib.loads(path.read_text(encoding="utf-8"))["finding"]]


def experiments() -> list[str]:
    """Return the experiments that the declared findings compare, sweeps apart, in their order."""
    return _compared(finding for finding in declared() if not finding.sweep)


def _compared(chosen: Iterable[Finding]) -> list[str]:
    return list(dict.fromkeys(side.experiment for finding in chosen for side in (finding.more, finding.less)))


def among(names: Collection[str]) -> list[Finding]:
    """Return the declared findings that compare only these experiments."""
    return [finding for finding in declared() if {finding.more.experiment, finding.less.experiment} <= {*names}]


def judge(finding: Finding, read: Read, looks: int = 1) -> FindingVerdict:
    """Judge a finding by the current versions of its experiments, at one of `looks` looks (`over_seeds_and_tasks`)."""
    table, name, measured = _figure(finding.figure)
    sides = finding.more, finding.less
    tables = [read(side.experiment, table) for side in sides]
    if any(rows is None for rows in tables):
        return FindingVerdict(finding, "not measured")
    by_seed = [measured(name, side, rows or ()) for side, rows in zip(sides, tables, strict=True)]
    more, less = (estimates.pop(None, None) for estimates in by_seed)
    if more is None or less is None:
        return FindingVerdict(finding, "not comparable", more, less)
    between = _paired(finding, read) or difference(more, less)
    values = [[estimate.value for _, estimate in sorted(side.items(), key=_by_number)] for side in by_seed]
    same_trainings = finding.more.experiment == finding.less.experiment and all(values)
    wider = over_seeds_and_tasks(between, *values, paired=same_trainings, looks=looks)
    over_seeds, spread = wider or (None, None)
    return FindingVerdict(finding, _word(over_seeds or between, finding.least), more, less, between, over_seeds, spread)


def undecided(names: Collection[str], read: Read) -> list[str]:
    """Return the experiments of findings that the first look leaves undecided; more seeds could decide these.

    Args:
        names: the experiments that have been run.
    """
    verdicts = [judge(finding, read, LOOKS) for finding in among(names)]
    return _compared(verdict.finding for verdict in verdicts if verdict.word == UNDECIDED and verdict.over_seeds)


def _by_number(item: tuple[int | None, Estimate]) -> int:
    return -1 if item[0] is None else item[0]


def _figure(figure: str) -> tuple[Table, str, Callable[[str, ComparisonSide, Rows], dict[int | None, Estimate]]]:
    """Return the table of a figure, the figure's name there, and the function that reads it."""
    if figure.startswith(PROBE):
        return "probes", figure.removeprefix(PROBE), mean_over_checkpoints
    if figure.startswith(REINFORCED):
        return "rl_samples", figure.removeprefix(REINFORCED), _last_steps
    return "metrics", figure, _metric


def _paired(finding: Finding, read: Read) -> Estimate | None:
    """Return the paired difference if a finding compares what two stages of one experiment solve, else None.

    Each task is its own control, so that the spread between tasks does not widen the interval.
    """
    more, less = finding.more, finding.less
    if finding.figure != "solved" or (more.experiment, more.decoding) != (less.experiment, less.decoding):
        return None
    for row in read(more.experiment, "stages") or ():
        if (row["decoding"], row["before"], row["after"]) == (more.decoding, less.role, more.role) and row["tasks"] > 1:
            return Estimate(row["difference"], row["tasks"], row["tasks"], row["ci_low"], row["ci_high"], "paired")
    return None


def _word(between: Estimate, least: float) -> str:
    if between.ci_low > 0:
        return "supported"
    if between.ci_high < least:
        return "not supported"
    return UNDECIDED


def _metric(name: str, side: ComparisonSide, rows: Rows) -> dict[int | None, Estimate]:
    """Return a side's metric by training seed; the pooled one under None."""
    decoding = "as_rolled_out" if side.role == "teacher" else side.decoding
    return {
        row["seed"]: Estimate(row["value"], row["n"], row["n"], row["ci_low"], row["ci_high"], row["interval"])
        for row in rows
        if (row["metric"], row["checkpoint_role"], row["decoding"]) == (name, side.role, decoding)
    }


def mean_over_checkpoints(name: str, side: ComparisonSide, rows: Rows) -> dict[int | None, Estimate]:
    """Average a probe's share on held-out prompts over the intermediate checkpoints, by seed and pooled under None.

    "NAME@STEP" is the share at the checkpoint of that step alone. All checkpoints and seeds answer the same prompts, so
    the effective size is the number of prompts.
    """
    name, _, step = name.partition("@")
    of_probe = [r for r in rows if (r["probe"], r["prompt_set"], r["role"]) == (name, "heldout", side.role)]
    intermediate = [row for row in of_probe if row["step"] is not None and (not step or row["step"] == int(step))]
    seeds: set[int | None] = {row["seed"] for row in intermediate}
    estimates = {}
    for seed in [*seeds, *([None] if seeds else [])]:
        of_seed = [row for row in intermediate if seed is None or row["seed"] == seed]
        n = min(row["n"] for row in of_seed)
        value = math.fsum(row["value"] for row in of_seed) / len(of_seed)
        estimates[seed] = Estimate(value, n, n, *wilson(value * n, n), "wilson_clustered")
    return estimates


def _last_steps(name: str, side: ComparisonSide, rows: Rows) -> dict[int | None, Estimate]:
    """Return the share of attempts in the last steps of reinforcement, by seed and pooled under None.

    Empty for a side without reinforcement.
    """
    if not rows or side.role != "rl":
        return {}
    begins = (1 - LATE) * (1 + max(row["step"] for row in rows))
    late = [row for row in rows if row["step"] >= begins and row[name] is not None]
    estimates: dict[int | None, Estimate] = {}
    for seed in (None, *{row["seed"] for row in late}):
        of_seed = [row for row in late if seed is None or row["seed"] == seed]
        if estimate := rate([row[name] for row in of_seed], [row["task_id"] for row in of_seed]):
            estimates[seed] = estimate
    return estimates
