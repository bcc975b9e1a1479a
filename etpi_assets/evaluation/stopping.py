"""The rule of `evaluate.stop`: the order of tasks, the looks at a metric's interval, and when to stop.

A look reads the metric off all rollouts so far, so the rule belongs to the code of eval_rollouts where a spec has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from etpi_assets.evaluation.metrics import paired_changes, sequential_rate
from etpi_assets.scoring.confidence import task_order
from etpi_assets.scoring.intervals import Estimate
from etpi_assets.specs.experiment import EvaluateSection, StopSection
from etpi_assets.tasks.family import Task


@dataclass(frozen=True)
class Look:
    """The interval after `tasks` tasks; `units` of them have the metric."""

    tasks: int
    units: int
    value: float | None
    ci_low: float | None
    ci_high: float | None


@dataclass(frozen=True)
class Stopped:
    """The end of an evaluation: after `tasks` of at most `budget` tasks, for `reason`, with all looks."""

    metric: str
    what: str
    tasks: int
    budget: int
    reason: str
    looks: tuple[Look, ...]

    def notes(self) -> dict[str, Any]:
        """Return the entry of the manifest."""
        return asdict(self)


def batches(tasks: Sequence[Task], section: EvaluateSection, stop: StopSection) -> list[list[Task]]:
    """Return the tasks of every look, in the order of evaluation: `section.tasks` first, then `stop.batch` at a time.

    Args:
        tasks: all tasks of the split.
    """
    ordered = sorted(tasks, key=lambda task: task_order(task.task_id))[: stop.max_tasks]
    first = section.tasks or len(ordered)
    later = range(first, len(ordered), stop.batch)
    return [ordered[:first], *(ordered[start : start + stop.batch] for start in later)]


def look(stop: StopSection, tasks: int, rollouts: pa.Table, scored: Mapping[str, pa.Table]) -> Look:
    """Measure the rule's metric on all rollouts so far.

    Args:
        tasks: the number of tasks with rollouts.
        scored: the tables `scores` and `agent_scores` of these rollouts.
    """
    estimate = _estimate(stop, rollouts, scored["scores"], scored["agent_scores"])
    if estimate is None:
        return Look(tasks, 0, None, None, None)
    return Look(tasks, estimate.n, estimate.value, estimate.ci_low, estimate.ci_high)


def reason(stop: StopSection, looked: Look) -> str | None:
    """Return why the evaluation stops after this look; None if it goes on."""
    if looked.ci_low is None or looked.ci_high is None:
        return None
    if looked.ci_high - looked.ci_low <= stop.width + 1e-9:
        return f"interval narrower than {stop.width:g}"
    if stop.decided and (looked.ci_low > 0 or looked.ci_high < 0):
        return "interval excludes 0"
    return None


def progress_line(stop: StopSection, looked: Look, budget: int, why: str | None) -> str:
    """Return the line that the run logs after a look."""
    interval = "not measured" if looked.ci_low is None else f"[{looked.ci_low:+.3f}, {looked.ci_high:+.3f}]"
    next_step = f"stop, {why}" if why else "going on" if looked.tasks < budget else "stop, no task is left"
    return f"{looked.tasks} of {budget} tasks: {stop.metric} {interval}; {next_step}"


def conclude(stop: StopSection, looks: Sequence[Look], budget: int, why: str | None) -> Stopped:
    """Return the record of a finished evaluation; `why` is None if the budget was spent first."""
    spent = f"all {budget} tasks used, interval still wider than {stop.width:g}"
    what = f"change from {stop.against} to {stop.role}" if stop.against else f"rate of {stop.role}"
    return Stopped(stop.metric, f"{what}, {stop.decoding}", looks[-1].tasks, budget, why or spent, tuple(looks))


def sentences(notes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sentences of reports and console on the manifest notes of an evaluation; none without a rule."""
    if stopped := notes.get("stop"):
        last = stopped["looks"][-1]
        interval = (
            f"{last['value']:+.2f} [{last['ci_low']:+.2f}, {last['ci_high']:+.2f}]"
            if last["value"] is not None
            else "not measured"
        )
        looks = len(stopped["looks"])
        yield (
            f"Stopped after {stopped['tasks']} of {stopped['budget']} tasks ({looks} look{'s'[: looks != 1]}): "
            f"{stopped['reason']}; {stopped['metric']}, {stopped['what']}: {interval}. "
            "Intervals of rates are confidence sequences, valid at such a stop."
        )


def _estimate(stop: StopSection, rollouts: pa.Table, scores: pa.Table, agents: pa.Table) -> Estimate | None:
    if stop.against is None:
        return sequential_rate(rollouts, scores, agents, stop.role, stop.decoding, stop.metric)
    changes = paired_changes(rollouts, scores, agents, stop.against, stop.role, sequential=True)
    return next((c.change for c in changes if (c.decoding, c.metric) == (stop.decoding, stop.metric)), None)
