"""The asset of the scoring stage: scored_rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.materialize import AssetRun, Produced, etpi_asset
from etpi_assets.scoring.behaviours import ScoringOptions, score
from etpi_assets.scoring.checks import every_rollout_scored
from etpi_assets.scoring.structure import structure_of
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.table import read_tasks
from etpi_assets.trajectories.blocks import blocks
from etpi_resources.lake.schemas import empty

_KEY = ("rollout_id", "agent_id", "turn")
COLUMNS = {
    "rollouts": ("rollout_id", "task_id", "repo", "exit_status", "outcome", "error"),
    "agents": ("rollout_id", "agent_id", "exit_status", "output_tokens"),
    "turns": (*_KEY, "actions", "inbox", "parse_error", "think_tokens", "post_think_tokens"),
    "messages": (*_KEY, "content", "kind"),
}
"""Table of a rollout set -> the columns that scoring reads."""
STRUCTURE_COLUMNS = ("content", "reasoning")
"""Further columns of turns, read if think blocks are checked against a structure."""
_SECONDS_PER_TURN = 1e-4
"""What scoring a turn takes one core, roughly."""
TOOL_COLUMNS = ("observation",)
"""Further columns of turns, read if agents were offered tools."""


@etpi_asset("scored_rollouts", checks=("every_rollout_scored",))
def scored_rollouts(run: AssetRun) -> Produced:
    tasks = run.read("tasks", "tasks")
    family = load_family(run.specs.suites[run.spec.suite].family) if run.spec.suite else None
    options = ScoringOptions(
        run.spec.scoring,
        entities={task.task_id: family.entities(task) for task in read_tasks(tasks)} if family else {},
        structure=structure_of(run.spec.scoring, run.spec.agent),
        tools=bool(run.spec.agent.tools),
    )
    more = (*(STRUCTURE_COLUMNS if options.structure else ()), *(TOOL_COLUMNS if options.tools else ()))
    columns = {**COLUMNS, "turns": (*COLUMNS["turns"], *more)}
    parts: dict[str, list[pa.Table]] = {name: [empty(name)] for name in run.node.tables}
    stored = {name: run.stored("raw_rollouts", name) for name in COLUMNS}
    named = ((f"{number:06}", block) for number, block in enumerate(blocks(stored, columns)))
    for part in run.parts_of(named, _BlockScorer(tasks, options), len(stored["turns"]) * _SECONDS_PER_TURN):
        for name in parts:
            parts[name].append(part[name])
    scored = {name: pa.concat_tables(tables) for name, tables in parts.items()}
    rollouts = run.read("raw_rollouts", "rollouts", columns=["rollout_id"])
    agents = run.read("raw_rollouts", "agents", columns=["rollout_id", "agent_id"])
    scores = scored["scores"].to_pylist()
    counted = [row for row in scores if not row["infrastructure_error"]]
    agents_counted = [r for r in scored["agent_scores"].to_pylist() if r["follow_through"] is not None]
    return Produced(
        tables=scored,
        checks=(every_rollout_scored(rollouts, agents, scored["scores"], scored["agent_scores"]),),
        metadata={
            "verdicts": dict(Counter(row["verdict"] for row in scores)),
            "plan_first": _share(row["plan_first"] for row in counted),
            "plan_content": _share(row["plan_content"] for row in counted),
            "adherence": _share(scored["turn_scores"]["adheres"].to_pylist()),
            "follow_through": _share(row["follow_through"] for row in agents_counted),
            "plan_first_reasons": _reasons(row["plan_first_reason"] for row in counted),
            "plan_content_reasons": _reasons(row["plan_content_reason"] for row in counted),
            "follow_through_reasons": _reasons(row["reason"] for row in agents_counted),
        },
    )


@dataclass(frozen=True)
class _BlockScorer:
    """The recipe for scoring a block of rollouts."""

    tasks: pa.Table
    options: ScoringOptions

    def __call__(self) -> Callable[[Mapping[str, pa.Table]], dict[str, pa.Table]]:
        return self.scored

    def scored(self, block: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
        """Return the tables of the asset for the rollouts of a block."""
        rollouts, agents, turns, messages = (block[name] for name in COLUMNS)
        of_block = self.tasks.filter(pc.is_in(self.tasks["task_id"], value_set=rollouts["task_id"]))  # pyright: ignore[reportAttributeAccessIssue]
        return score(rollouts, agents, turns, of_block, self.options, messages)


def _share(values: Iterable[float | None]) -> str:
    not_null = [value for value in values if value is not None]
    return f"{sum(not_null)} of {len(not_null)}"


def _reasons(reasons: Iterable[str | None]) -> dict[str, int]:
    """Count the reasons, without agent ids and without the names after a colon; the eight most frequent."""
    parts = [part for reason in reasons if reason for part in reason.split("; ")]
    stripped = [part.partition(": ")[2] if part.startswith("agent") else part.partition(":")[0] for part in parts]
    return dict(Counter(stripped).most_common(8))


ASSETS = [scored_rollouts]
