"""The scoring stage as an asset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from etpi_assets.materialize import AssetRun, Produced, etpi_asset
from etpi_assets.scoring.behaviours import score
from etpi_assets.scoring.checks import every_rollout_scored
from etpi_assets.scoring.structure import structure_of
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.table import read_tasks

_TURNS = ["rollout_id", "agent_id", "turn", "actions", "inbox", "parse_error", "think_tokens", "post_think_tokens"]
_TEXTS = ["content", "reasoning"]
_MESSAGES = ["rollout_id", "agent_id", "turn", "content", "kind"]


@etpi_asset("scored_rollouts", checks=("every_rollout_scored",))
def scored_rollouts(run: AssetRun) -> Produced:
    rollouts = run.read("raw_rollouts", "rollouts")
    agents = run.read("raw_rollouts", "agents")
    tasks = run.read("tasks", "tasks")
    family = load_family(run.specs.suites[run.spec.suite].family) if run.spec.suite else None
    structure = structure_of(run.spec.scoring, run.spec.agent)
    scored = score(
        rollouts,
        agents,
        run.read("raw_rollouts", "turns", columns=_TURNS + _TEXTS * (structure is not None)),
        tasks,
        run.spec.scoring,
        run.read("raw_rollouts", "messages", columns=_MESSAGES),
        {task.task_id: family.entities(task) for task in read_tasks(tasks)} if family else None,
        structure,
    )
    pairs = scored["scores"].to_pylist()
    counted = [row for row in pairs if not row["infrastructure_error"]]
    agents_counted = [r for r in scored["agent_scores"].to_pylist() if r["follow_through"] is not None]
    return Produced(
        tables=scored,
        checks=(every_rollout_scored(rollouts, agents, scored["scores"], scored["agent_scores"]),),
        metadata={
            "verdicts": dict(Counter(row["verdict"] for row in pairs)),
            "plan_first": _share(row["plan_first"] for row in counted),
            "plan_content": _share(row["plan_content"] for row in counted),
            "adherence": _share(scored["turn_scores"]["adheres"].to_pylist()),
            "follow_through": _share(row["follow_through"] for row in agents_counted),
            "plan_first_reasons": _reasons(row["plan_first_reason"] for row in counted),
            "plan_content_reasons": _reasons(row["plan_content_reason"] for row in counted),
            "follow_through_reasons": _reasons(row["reason"] for row in agents_counted),
        },
    )


def _share(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known)} of {len(known)}"


def _reasons(reasons: Iterable[str | None]) -> dict[str, int]:
    """How often each reason occurs; a pair's text is taken apart, and what follows a colon (names) left out."""
    parts = [part for reason in reasons if reason for part in reason.split("; ")]
    stripped = [part.partition(": ")[2] if part.startswith("agent") else part.partition(":")[0] for part in parts]
    return dict(Counter(stripped).most_common(8))


ASSETS = [scored_rollouts]
