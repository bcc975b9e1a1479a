"""A scripted policy of `coop_tiny` with long conversations: after its first turn it reads the repository for a while.

It wraps the policy of `policy`, which stays as it is because the corpus of the tiny base is written with it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from etpi_assets.agent.actions import format_action
from etpi_lab.worlds.coop_tiny.policy import CoopTinyPolicy, CoopTinySkill
from etpi_resources.engines import Request


@dataclass(frozen=True)
class SurveyingSkill(CoopTinySkill):
    """The skill of `CoopTinyPolicy`, and how long an agent reads.

    Attributes:
        survey_turns: turns, a whole number, in which an agent reads files of the repository after its first turn.
    """

    survey_turns: float = 0

    def __post_init__(self) -> None:
        if self.survey_turns < 0 or self.survey_turns != int(self.survey_turns):
            raise ValueError(f"skill.survey_turns = {self.survey_turns}: a whole number of turns, 0 or more")
        self.base()

    def base(self) -> CoopTinySkill:
        """Return the skill without the survey."""
        return CoopTinySkill(**{field.name: getattr(self, field.name) for field in fields(CoopTinySkill)})


class SurveyingPolicy:
    """Scripted policy: the first turn of `CoopTinyPolicy`, `survey_turns` commands that read files, its other turns."""

    def __init__(self, skill: SurveyingSkill, seed: int = 0) -> None:
        self.skill, self.seed, self.turns = skill, seed, int(skill.survey_turns)
        self._works = CoopTinyPolicy(skill.base(), seed)

    def __call__(self, request: Request) -> str:
        users = [index for index, message in enumerate(request.messages) if message["role"] in ("user", "tool")][1:]
        done = len(users) - 1
        if 0 <= done < self.turns:
            return self._survey(request, done)
        surveyed = set(users[1 : 1 + self.turns])
        kept = [message for index, message in enumerate(request.messages) if index not in surveyed]
        return self._works(replace(request, messages=kept))

    def _survey(self, request: Request, turn: int) -> str:
        """Return a turn of the survey; it depends on (seed, session, turn) and the task alone."""
        rng = random.Random(f"{self.seed}/{request.session}/survey/{turn}")
        command = rng.choice(_commands(request.privileged["payload"]))
        think = f"<think>\n{rng.choice(_THOUGHTS)}\n</think>\n\n" if rng.random() < self.skill.verbose_think else ""
        return f"{think}{format_action(command)}"


def _commands(payload: Mapping[str, Any]) -> list[str]:
    """Return commands that read the repository and print little."""
    paths = [path for path in payload["files"] if path != payload["check"]]
    names = [feature["function"] for feature in payload["features"].values()]
    return [
        "ls",
        *(f"head -n 2 {path}" for path in paths),
        *(f"grep -n def {path}" for path in paths),
        *(f"wc -l {path}" for path in paths),
        *(f"grep -rn {name} ." for name in names),
    ]


_THOUGHTS = (
    "Let me see how this is written before I change it.",
    "I want to know the other files too.",
    "One more look, then I can start.",
)
