"""The checks of `scored_rollouts`. The floors that a spec sets are curation's gates."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from etpi_assets.checks import outcome
from etpi_assets.scoring.judging import Judged
from etpi_resources.lake.check_outcome import CheckOutcome


def every_rollout_scored(
    rollouts: pa.Table, agents: pa.Table, scores: pa.Table, agent_scores: pa.Table
) -> CheckOutcome:
    """Check that every rollout and agent is scored exactly once; count infrastructure errors."""
    expected = Counter(rollouts["rollout_id"].to_pylist()), Counter(_agents(agents))
    scored = Counter(scores["rollout_id"].to_pylist()), Counter(_agents(agent_scores))
    errors = sum(scores["infrastructure_error"].to_pylist())
    figures = {"rollouts": len(rollouts), "agents": len(agents), "infrastructure_errors": errors}
    wrong = [str(k) for a, b in zip(expected, scored, strict=True) for k in sorted((a - b) + (b - a))]
    return outcome("every_rollout_scored", not wrong, figures, wrong=len(wrong), first=wrong[:3])


def one_judge(verdicts: pa.Table, judged: Judged) -> CheckOutcome:
    """Check that the last verdicts on all rollouts are of one judge, so that their rewards can be compared."""
    last = dict(zip(verdicts["rollout_id"].to_pylist(), verdicts["judge"].to_pylist(), strict=True))
    judges = Counter(last.values())
    figures = {"judges": dict(judges), "judged_again": judged.judged, **judged.refused}
    counts = "; ".join(f"{count} of {judge}" for judge, count in judges.most_common())
    why = ", ".join(f"{count} {reason}" for reason, count in judged.refused.items()) or "none"
    only = next(iter(judges), "no judge")
    return outcome("one_judge", len(judges) < 2, figures, verdicts=len(last), only=only, counts=counts, why=why)


def _agents(table: pa.Table) -> list[tuple[str, str]]:
    return list(zip(table["rollout_id"].to_pylist(), table["agent_id"].to_pylist(), strict=True))
