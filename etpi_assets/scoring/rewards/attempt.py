"""The values of a recorded rollout that reward functions read, and the error of a missing one.

A missing input raises an error that names the row. Scoring it as zero would train on noise without anyone noticing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.lake.check_outcome import BadData


class BadReward(BadData):
    """A reward cannot be computed for a row; the message names the row, the function and the remedy."""


@dataclass(frozen=True)
class Attempt:
    """One rollout, or one agent's part of it, as reward functions see it; a value that was not recorded is None.

    Attributes:
        rollout_id, task_id: name the row in error messages.
        request: the task's instruction, as the agent read it.
        text: the texts of all assistant turns, concatenated.
        turns: number of assistant turns.
        tool_turns: number of turns whose action ran and was answered.
        response_tokens: number of ids after the first prompt, observations included.
        outcome: the verifier's reward.
    """

    rollout_id: str
    task_id: str
    request: str | None
    text: str | None
    turns: int | None = None
    tool_turns: int | None = None
    response_tokens: int | None = None
    outcome: float | None = None

    def known(self, name: str) -> Any:
        """Return a value that a reward needs. Raises BadReward if it was not recorded."""
        value = getattr(self, name)
        if value is None or (name == "request" and not value):
            raise self.refused(_MISSING[name])
        return value

    def refused(self, problem: str) -> BadReward:
        """Return the error of an attempt that cannot be rewarded."""
        return BadReward(f"rollout {self.rollout_id} of task {self.task_id}: {problem}")


_MISSING = {
    "request": "the task's request is missing",
    "text": "no text was recorded",
    "turns": "its turns are missing",
    "tool_turns": "its tool turns are missing",
    "response_tokens": "its response tokens are missing",
    "outcome": "the verifier's reward is missing; look at the rollout's error, and at the family's judge",
}
"""Value -> what is wrong without it."""


def attempt_of(record: RolloutRecord, task: Task, agent_id: str | None = None) -> Attempt:
    """Read a rollout: all its agents, or one of them.

    Raises:
        BadReward: no agent has a turn.
    """
    row = f"rollout {record.rollout_id} of task {record.task_id}"
    agents = [agent for agent in record.agents if agent.turns and agent_id in (None, agent.agent_id)]
    if not agents:
        raise BadReward(f"{row}: no turn was recorded ({record.error or 'no error is recorded either'})")
    turns = [turn for agent in agents for turn in agent.turns]
    tokens: int | None = 0
    for agent in agents:
        first, last = agent.turns[0], agent.turns[-1]
        if tokens is None or first.prompt_ids is None or last.prompt_ids is None or last.output_ids is None:
            tokens = None
        else:
            tokens += len(last.prompt_ids) + len(last.output_ids) - len(first.prompt_ids)
    return Attempt(
        rollout_id=record.rollout_id,
        task_id=task.task_id,
        request=task.instruction,
        text="".join(turn.content for turn in turns),
        turns=len(turns),
        tool_turns=sum(1 for turn in turns if turn.actions and turn.observation is not None),
        response_tokens=tokens,
        outcome=(record.outcome or {}).get("reward"),
    )
