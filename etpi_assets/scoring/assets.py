"""The asset of the scoring stage: scored_rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.asset import AssetRun, Input, Produced, asset
from etpi_assets.scoring.behaviours import ScoringOptions, every_rollout_scored, score
from etpi_assets.scoring.judging import Judged, Judging, Row, one_judge, with_verdicts
from etpi_assets.scoring.structure import structure_of
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.table import read_tasks
from etpi_assets.trajectories.tables import blocks
from etpi_resources.chat.format import load_chat_format
from etpi_resources.hashes import json_hash
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


_SHOWN_OF_SCORES = ("rollout_id", "infrastructure_error", "verdict", "plan_first", "plan_content")
_SHOWN_OF_AGENTS = ("rollout_id", "agent_id", "follow_through")
"""The columns that the check and the asset's page show of all scores."""


@asset(
    set="rollout_set",
    group="rollouts",
    tables=("scores", "agent_scores", "turn_scores", "verdicts"),
    sections=("scoring", "agent.grammar", "agent.tools"),
    across_seams=True,
    versions=("scoring", "tasks", "family.{scored}", "judge", "judge.{scored}"),
    summary="The present judge's verdict on stored work, the exit status and the three behaviours of every rollout.",
)
def scored_rollouts(run: AssetRun, raw_rollouts: Input, tasks: Input) -> Produced:
    task_rows = tasks.read("tasks")
    family = load_family(run.specs.suites[run.spec.suite].family) if run.spec.suite else None
    options = ScoringOptions(
        run.spec.scoring,
        entities={task.task_id: family.entities(task) for task in read_tasks(task_rows)} if family else {},
        structure=structure_of(run.spec.scoring, [run.spec.agent]),
        tools=bool(run.spec.agent.tools),
    )
    more = (*(STRUCTURE_COLUMNS if options.structure else ()), *(TOOL_COLUMNS if options.tools else ()))
    columns = {**COLUMNS, "turns": (*COLUMNS["turns"], *more)}
    stored = {name: raw_rollouts.stored(name) for name in COLUMNS}
    judged = judging(run, raw_rollouts).judged(read_tasks(task_rows))
    named = (
        (f"{number:06}-{_name(later)}", (block, later))
        for number, block in enumerate(blocks(stored, columns))
        for later in [_later(block, judged)]
    )
    factory = partial(_scorer, task_rows, options, judged.recorded)
    for _ in run.spool_parts(run.parts_of(named, factory, len(stored["turns"]) * _SECONDS_PER_TURN)):
        pass
    return _produced(run, raw_rollouts, judged)


def judging(run: AssetRun, raw_rollouts: Input) -> Judging:
    """Return what judges the rollouts of a set again: an imported set's where its suite has an environment."""
    spec: RolloutSetSpec = run.spec
    kind, suite = spec.sandbox, run.specs.suites[spec.suite] if spec.suite else None
    if spec.kind == "imported" and suite:
        kind = load_family(suite.family).sandbox(suite.params)
    chat = partial(load_chat_format, spec.agent.tokenizer)
    return Judging(run, raw_rollouts, spec.suite, kind, spec.agent, chat, imported=spec.kind == "imported")


def _later(block: Mapping[str, pa.Table], judged: Judged) -> dict[str, Sequence[Row]]:
    ids = block["rollouts"]["rollout_id"].to_pylist()
    return {rollout_id: judged.later[rollout_id] for rollout_id in ids if rollout_id in judged.later}


def _name(later: Mapping[str, Sequence[Row]]) -> str:
    """Return a name of later verdicts, which the input key does not cover."""
    return json_hash([row["judged_at"].isoformat() for rows in later.values() for row in rows])[:8]


def _produced(run: AssetRun, raw_rollouts: Input, judged: Judged) -> Produced:
    tables = {name: run.spooled(name) for name in run.node.tables}
    scores = columns_of(tables["scores"], _SHOWN_OF_SCORES)
    agent_scores = columns_of(tables["agent_scores"], _SHOWN_OF_AGENTS)
    counted = scores.filter(~pc.field("infrastructure_error"))
    rollouts = raw_rollouts.read("rollouts", columns=["rollout_id"])
    agents = raw_rollouts.read("agents", columns=["rollout_id", "agent_id"])
    return Produced(
        tables=tables,
        checks=(
            every_rollout_scored(rollouts, agents, scores, agent_scores),
            one_judge(columns_of(tables["verdicts"], ["rollout_id", "judge"]), judged),
        ),
        notes=judged.notes(),
        metadata={
            "verdicts": dict(Counter(scores["verdict"].to_pylist())),
            "plan_first": _share(counted["plan_first"].to_pylist()),
            "plan_content": _share(counted["plan_content"].to_pylist()),
            "adherence": _share(columns_of(tables["turn_scores"], ["adheres"])["adheres"].to_pylist()),
            "follow_through": _share(agent_scores["follow_through"].to_pylist()),
        },
    )


_Block = tuple[Mapping[str, pa.Table], Mapping[str, Sequence[Row]]]
"""Tables of some rollouts, and their later verdicts."""


def _scorer(tasks: pa.Table, options: ScoringOptions, recorded: str) -> Callable[[_Block], dict[str, pa.Table]]:
    """Return the function that scores the rollouts of a block."""

    def scored(block: _Block) -> dict[str, pa.Table]:
        rollouts, agents, turns, messages = (block[0][name] for name in COLUMNS)
        rollouts, verdicts = with_verdicts(rollouts, block[1], recorded)
        of_block = tasks.filter(pc.is_in(tasks["task_id"], value_set=rollouts["task_id"]))  # pyright: ignore[reportAttributeAccessIssue]
        return {**score(rollouts, agents, turns, of_block, options, messages), "verdicts": verdicts}

    return scored


def _share(values: Iterable[float | None]) -> str:
    not_null = [value for value in values if value is not None]
    return f"{sum(not_null)} of {len(not_null)}"
