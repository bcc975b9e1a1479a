"""A scripted teacher of terminal tasks that is right, out of form or wrong in the verb, by its skill.

Belongs here: what it answers, and how often which way. Does not belong here: turning text into ids (the scripted
engine), or the tasks. Its mistakes are what leaves a student room for reinforcement to improve on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields

from etpi_assets.rollouts.contract import format_contract
from etpi_assets.tasks.terminal_tiny.generate import KINDS, command_of
from etpi_resources.engines import Request


@dataclass(frozen=True)
class TerminalSkill:
    """Probabilities, drawn once a rollout and independently.

    Attributes:
        unformatted: the answer breaks the prompt contract in one of several ways.
        wrong_verb: the command is another kind's, on the same files.
    """

    unformatted: float = 0.0
    wrong_verb: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= 1:
                raise ValueError(f"skill.{field.name} = {getattr(self, field.name)}: a probability is between 0 and 1")

    @classmethod
    def of(cls, values: Mapping[str, float]) -> TerminalSkill:
        """The skill a spec's `engine.skill` table describes; ValueError names an unknown key."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"engine.skill: unknown {unknown}; there are {known}")
        return cls(**values)


class TerminalTinyPolicy:
    """The policy of one skill; `policy(request)` answers the task in `request.privileged["payload"]`."""

    def __init__(self, skill: TerminalSkill, seed: int = 0) -> None:
        self.skill, self.seed = skill, seed

    def __call__(self, request: Request) -> str:
        payload = request.privileged["payload"]
        rng = random.Random(f"{self.seed}/{request.session}")
        kind = next(kind for kind in KINDS if kind.verb == payload["verb"])
        if rng.random() < self.skill.wrong_verb:
            kind = rng.choice([other for other in KINDS if other is not kind])
        command, thinking = command_of(kind, payload), f"I use {kind.verb}."
        if rng.random() >= self.skill.unformatted:
            return format_contract(thinking, command)
        form = rng.choice(_OUT_OF_FORM)
        return form.format(thinking=thinking, command=command)


_OUT_OF_FORM = (
    "<thinking>{thinking}</thinking>\n{command}",
    "{thinking}\n```bash\n{command}\n```",
    "<thinking>{thinking}\n```bash\n{command}\n```",
    "{command}",
)
