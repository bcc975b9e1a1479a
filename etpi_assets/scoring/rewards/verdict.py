"""The verifier's reward and verdict of a rollout, read from `rollouts.outcome`.

Suite families judge rollouts and importers copy outcomes; this module reads both.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

UNKNOWN = "unknown"
INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True)
class Reward:
    """A rollout's reward (None if it was not judged), its verdict, whether an infrastructure error ended it, and judge
    and trust of the verdict, where they are known.

    A rollout with an infrastructure error says nothing about its agents.
    """

    reward: float | None
    verdict: str
    infrastructure: bool
    judge: str | None = None
    trust: str | None = None


def read_reward(outcome: str | None, error: str | None, rollout_id: str = "") -> Reward:
    """Read the reward of one row of `rollouts`.

    Args:
        outcome: JSON {"reward": number or null, "verdict": text, ...}, or None if there is no verdict.
        error: the infrastructure error, or None.
        rollout_id: names the row in error messages.

    Raises:
        ValueError: the outcome is not such JSON, or the reward is not a finite number.
    """
    fields = _outcome(outcome, rollout_id)
    verdict = fields.get("verdict") or UNKNOWN
    if error is not None or verdict == INFRASTRUCTURE:
        return Reward(None, INFRASTRUCTURE, True)
    details = fields.get("details")
    judge, trust = fields.get("judge"), details.get("verdict_trust") if isinstance(details, dict) else None
    reward = fields.get("reward")
    if reward is None:
        return Reward(None, verdict, False, judge, trust)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(
            f"rollout {rollout_id}: outcome.reward = {reward!r} is not a finite number; fix the verifier or importer"
        )
    return Reward(float(reward), verdict, False, judge, trust)


def _outcome(outcome: str | None, rollout_id: str) -> dict:
    if outcome is None:
        return {}
    try:
        fields = json.loads(outcome)
    except ValueError as error:
        raise ValueError(
            f"rollout {rollout_id}: outcome is not JSON ({error}); fix the verifier or importer"
        ) from error
    if not isinstance(fields, dict):
        raise ValueError(
            f"rollout {rollout_id}: outcome is {outcome[:40]!r}, expected an object with `reward` and `verdict`"
        )
    return fields
