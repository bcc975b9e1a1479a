"""plan_first, plan_content and follow_through as the published plan-first report words them.

`behaviours` holds the hardened reading. This one repeats what the report counted, so that its figures and ours compare:

- plan_first: an agent's first action sends a message, and it is shown one of the other agent before its first bash
  command. The message may be any; a turn that also runs a command has run bash.
- plan_content: its first message contains two of the keywords, anywhere and in any case, and matches the path pattern.
  The path need not occur in the task. Keywords and pattern are those of the scoring section: the report prints the
  keywords, but not its pattern.
- follow_through: one of its bash commands contains a path of either agent's first message, as it is written there.
  Commands before the plan count too; functions do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from etpi_assets.scoring.agent_traces import AgentTrace
from etpi_assets.specs.rollout_set import Reading, ScoringSection

BEHAVIOURS = ("plan_first", "plan_content", "follow_through")
"""The behaviours that have both readings."""
COLUMNS = tuple(f"{name}_published" for name in BEHAVIOURS)
"""Their columns and metrics in this reading."""


def in_reading(behaviour: str, reading: Reading) -> str:
    """Return the column and metric of a behaviour in a reading; other metrics have only one."""
    return f"{behaviour}_published" if reading == "published" and behaviour in BEHAVIOURS else behaviour


@dataclass(frozen=True)
class PublishedReading:
    """The predicates of one scoring section; `keywords` in lower case with straight apostrophes."""

    keywords: Sequence[str]
    path: re.Pattern[str]

    @classmethod
    def of(cls, section: ScoringSection) -> PublishedReading:
        """Read a scoring section. Raises re.error: its path pattern is no regular expression."""
        return cls([_folded(word) for word in section.keywords], re.compile(section.path_pattern))

    def of_agents(self, team: Sequence[AgentTrace]) -> list[dict[str, bool]]:
        """Return COLUMNS of each agent of a pair."""
        paths = {path for agent in team if agent.plan for path in self.path.findall(agent.plan[1])}
        return [
            dict(zip(COLUMNS, (_plans_first(agent), self._has_content(agent), _follows(agent, paths)), strict=True))
            for agent in team
        ]

    def _has_content(self, agent: AgentTrace) -> bool:
        if agent.plan is None:
            return False
        text = _folded(agent.plan[1])
        return sum(word in text for word in self.keywords) >= 2 and self.path.search(agent.plan[1]) is not None


def of_rollout(agents: Sequence[dict[str, bool]]) -> dict[str, bool | float]:
    """Return COLUMNS of a rollout: whether all agents planned, and the share that followed through."""
    first, content, followed = COLUMNS
    return {
        **{name: all(agent[name] for agent in agents) for name in (first, content)},
        followed: sum(agent[followed] for agent in agents) / len(agents),
    }


def _plans_first(agent: AgentTrace) -> bool:
    if not agent.actions or agent.actions[0][1]["kind"] != "send_message":
        return False
    bash = next((turn for turn, action in agent.actions if action["kind"] == "bash"), agent.turns)
    return bool(agent.received(bash))


def _follows(agent: AgentTrace, paths: set[str]) -> bool:
    commands = [action["command"] for _, action in agent.actions if action["kind"] == "bash"]
    return any(path in command for command in commands for path in paths)


def _folded(text: str) -> str:
    return text.replace("\u2019", "'").replace("\u2018", "'").lower()
