"""What must hold of scores.

Belongs here: the checks of `scored_rollouts`. Does not belong here: floors that a spec sets, curation's gates.
"""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from etpi_resources.lake.checks import CheckOutcome


def every_rollout_scored(
    rollouts: pa.Table, agents: pa.Table, scores: pa.Table, agent_scores: pa.Table
) -> CheckOutcome:
    """Every rollout and every agent is scored, once; what failed for want of infrastructure is counted."""
    wanted = Counter(rollouts["rollout_id"].to_pylist()), Counter(_agents(agents))
    found = Counter(scores["rollout_id"].to_pylist()), Counter(_agents(agent_scores))
    broken = sum(scores["infrastructure_error"].to_pylist())
    figures = {"rollouts": len(rollouts), "agents": len(agents), "infrastructure_errors": broken}
    wrong = [str(k) for a, b in zip(wanted, found, strict=True) for k in sorted((a - b) + (b - a))]
    if wrong:
        message = f"{len(wrong)} rollouts or agents are not scored once, first {wrong[:3]}; do not use this version"
        return CheckOutcome("every_rollout_scored", False, message, figures=figures)
    message = (
        f"{len(rollouts)} rollouts of {len(agents)} agents scored; {broken} infrastructure errors, out of all rates."
    )
    return CheckOutcome("every_rollout_scored", True, message, figures=figures)


def _agents(table: pa.Table) -> list[tuple[str, str]]:
    return list(zip(table["rollout_id"].to_pylist(), table["agent_id"].to_pylist(), strict=True))
