"""Rewards of GRPO-TCR (docs/rl.md): the outcome, the tool-call reward (TCR), and the overlong penalty."""

from __future__ import annotations

from etpi_assets.scoring.rewards.attempt import Attempt, BadReward


def outcome(attempt: Attempt, *, right: float = 1.0, wrong: float = -1.0) -> float:
    """Return `right` if the verifier's reward is 1, else `wrong`."""
    return right if _solved(attempt) else wrong


def tool_call_reward(attempt: Attempt, *, ceiling: float = -0.6, step: float = 0.1) -> float:
    """Return 1 if solved, else min(ceiling, -1 + (num_turns - 2) / 2 * step): wrong attempts lose less if they call.

    num_turns is tool-response turns + assistant turns + 1 for the first prompt. A call without effect earns as much as
    any other, up to the ceiling; reports therefore show accuracy beside the share of attempts that called a tool.
    """
    if _solved(attempt):
        return 1.0
    turns = _known(attempt, attempt.tool_turns, "tool turns") + _known(attempt, attempt.turns, "turns") + 1
    return min(ceiling, -1.0 + (turns - 2) / 2 * step)


def overlong(attempt: Attempt, *, limit: int = 10480, buffer: int = 3000, factor: float = 1.0) -> float:
    """Return min(-(length - (limit - buffer)) / buffer * factor, 0); the length includes observations.

    There is no lower bound.
    """
    length = _known(attempt, attempt.response_tokens, "response tokens")
    return min(-(length - (limit - buffer)) / buffer * factor, 0.0)


def _solved(attempt: Attempt) -> bool:
    if attempt.outcome is None:
        raise BadReward(
            f"rollout {attempt.rollout_id} of task {attempt.task_id}: the verifier's reward is missing; look at the "
            "rollout's error, and at the family's judge"
        )
    return attempt.outcome == 1.0


def _known(attempt: Attempt, value: int | None, name: str) -> int:
    if value is None:
        raise BadReward(f"rollout {attempt.rollout_id} of task {attempt.task_id}: its {name} are missing")
    return value
