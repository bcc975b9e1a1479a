"""The asset of the scoring stage: scored_rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.asset import AssetRun, Input, Produced, asset
from etpi_assets.scoring.behaviours import ScoringOptions, score
from etpi_assets.scoring.score_checks import every_rollout_scored
from etpi_assets.scoring.structure import structure_of
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.table import read_tasks
from etpi_assets.trajectories.blocks import blocks
from etpi_resources.lake.stored import columns_of

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
"""Estimated seconds of one core to score a turn."""
TOOL_COLUMNS = ("observation",)
"""Further columns of turns, read if agents were offered tools."""


_SHOWN_OF_SCORES = (
    "rollout_id", "infrastructure_error", "verdict", "plan_first", "plan_content", "plan_first_reason",
    "plan_content_reason",
)  # fmt: skip
_SHOWN_OF_AGENTS = ("rollout_id", "agent_id", "follow_through", "reason")
"""The columns that the check and the asset's page show of all scores."""


@asset(
    set="rollout_set",
    group="rollouts",
    tables=("scores", "agent_scores", "turn_scores"),
    sections=("scoring", "agent.grammar", "agent.tools"),
    checks=("every_rollout_scored",),
    summary="The verifier's reward, the exit status and the three behaviours of every rollout.",
)
def scored_rollouts(run: AssetRun, raw_rollouts: Input, tasks: Input) -> Produced:
    task_rows = tasks.read("tasks")
    family = load_family(run.specs.suites[run.spec.suite].family) if run.spec.suite else None
    options = ScoringOptions(
        run.spec.scoring,
        entities={task.task_id: family.entities(task) for task in read_tasks(task_rows)} if family else {},
        structure=structure_of(run.spec.scoring, run.spec.agent),
        tools=bool(run.spec.agent.tools),
    )
    more = (*(STRUCTURE_COLUMNS if options.structure else ()), *(TOOL_COLUMNS if options.tools else ()))
    columns = {**COLUMNS, "turns": (*COLUMNS["turns"], *more)}
    stored = {name: raw_rollouts.stored(name) for name in COLUMNS}
    named = ((f"{number:06}", block) for number, block in enumerate(blocks(stored, columns)))
    adhering = [0, 0]  # turns that adhere, turns that can
    with ExitStack() as stack:
        spools = {name: stack.enter_context(run.spool(name)) for name in run.node.tables}
        for part in run.parts_of(named, _BlockScorer(task_rows, options), len(stored["turns"]) * _SECONDS_PER_TURN):
            for name, spool in spools.items():
                spool.add(part[name])
            adheres = part["turn_scores"]["adheres"].drop_null()
            adhering[0] += pc.sum(adheres).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
            adhering[1] += len(adheres)
    return _produced(run, raw_rollouts, f"{adhering[0]} of {adhering[1]}")


def _produced(run: AssetRun, raw_rollouts: Input, adherence: str) -> Produced:
    tables = {name: run.spooled(name) for name in run.node.tables}
    scores = columns_of(tables["scores"], _SHOWN_OF_SCORES)
    agent_scores = columns_of(tables["agent_scores"], _SHOWN_OF_AGENTS)
    counted = scores.filter(~pc.field("infrastructure_error"))
    agents_counted = agent_scores.filter(pc.field("follow_through").is_valid())
    rollouts = raw_rollouts.read("rollouts", columns=["rollout_id"])
    agents = raw_rollouts.read("agents", columns=["rollout_id", "agent_id"])
    return Produced(
        tables=tables,
        checks=(every_rollout_scored(rollouts, agents, scores, agent_scores),),
        metadata={
            "verdicts": dict(Counter(scores["verdict"].to_pylist())),
            "plan_first": _share(counted["plan_first"].to_pylist()),
            "plan_content": _share(counted["plan_content"].to_pylist()),
            "adherence": adherence,
            "follow_through": _share(agents_counted["follow_through"].to_pylist()),
            "plan_first_reasons": _reasons(counted["plan_first_reason"].to_pylist()),
            "plan_content_reasons": _reasons(counted["plan_content_reason"].to_pylist()),
            "follow_through_reasons": _reasons(agents_counted["reason"].to_pylist()),
        },
    )


@dataclass(frozen=True)
class _BlockScorer:
    """Build the function that scores a block of rollouts."""

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
