"""The verifier's word on a rollout, as a reward and a verdict.

Belongs here: reading `rollouts.outcome`, whoever wrote it. Does not belong here: judging, which the suite family does,
or behaviour, which has nothing to do with the reward.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

UNKNOWN = "unknown"
INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True)
class Reward:
    """A rollout's reward (None: nobody judged it), verdict, and whether infrastructure failed it: such a rollout says
    nothing about who acted."""

    reward: float | None
    verdict: str
    infrastructure: bool


def read_reward(outcome: str | None, error: str | None, rollout_id: str = "") -> Reward:
    """The reward of one row of `rollouts`.

    Args:
        outcome: JSON {"reward": number or null, "verdict": text, ...}, or None where there is no verdict.
        error: the infrastructure error, or None.
        rollout_id: for the message of an error.

    Raises:
        ValueError: the outcome is no such JSON, or the reward is no finite number.
    """
    found = _outcome(outcome, rollout_id)
    verdict = found.get("verdict") or UNKNOWN
    if error is not None or verdict == INFRASTRUCTURE:
        return Reward(None, INFRASTRUCTURE, True)
    reward = found.get("reward")
    if reward is None:
        return Reward(None, verdict, False)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(
            f"rollout {rollout_id}: outcome.reward = {reward!r} is no finite number; mend the verifier or importer"
        )
    return Reward(float(reward), verdict, False)


def _outcome(outcome: str | None, rollout_id: str) -> dict:
    if outcome is None:
        return {}
    try:
        found = json.loads(outcome)
    except ValueError as error:
        raise ValueError(
            f"rollout {rollout_id}: outcome is not JSON ({error}); mend the verifier or importer"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"rollout {rollout_id}: outcome is {outcome[:40]!r}, expected an object with `reward` and `verdict`"
        )
    return found
