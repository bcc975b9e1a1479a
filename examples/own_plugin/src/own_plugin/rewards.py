"""A reward for short attempts that succeed."""

from __future__ import annotations

from etpi_assets.scoring.rewards.attempt import Attempt, BadReward


def brevity(attempt: Attempt, *, longest: int = 8) -> float:
    """Return 1 for a solved attempt of one turn, falling to 0 at `longest` turns; 0 for an unsolved one.

    Raises:
        BadReward: the attempt's turns or outcome were not recorded.
    """
    if attempt.turns is None or attempt.outcome is None:
        raise BadReward(f"rollout {attempt.rollout_id}: brevity needs its turns and its outcome")
    return attempt.outcome * max(0.0, 1 - (attempt.turns - 1) / (longest - 1))
