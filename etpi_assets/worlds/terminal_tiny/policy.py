"""The scripted policy of `terminal_tiny`: correct, wrongly formatted, or with a wrong verb, by its skill.

Its mistakes leave its students room for improvement by reinforcement.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from etpi_assets.agent.actions import next_turn
from etpi_assets.agent.contract import format_contract
from etpi_assets.worlds.skill import PolicySkill
from etpi_assets.worlds.terminal_tiny.generate import KINDS, command_of
from etpi_resources.engines import Request


@dataclass(frozen=True)
class TerminalSkill(PolicySkill):
    """Probabilities, sampled once a rollout and independently.

    Attributes:
        unformatted: the answer breaks the prompt contract in one of several ways.
        wrong_verb: the command is another kind's, on the same files.
    """

    unformatted: float = 0.0
    wrong_verb: float = 0.0


class TerminalTinyPolicy:
    """Scripted policy: `policy(request)` answers the task in `request.privileged["payload"]`, by a call if the
    request offers tools."""

    def __init__(self, skill: TerminalSkill, seed: int = 0) -> None:
        self.skill, self.seed = skill, seed

    def __call__(self, request: Request) -> str:
        payload = request.privileged["payload"]
        rng = random.Random(f"{self.seed}/{request.session}")
        verb, command = payload["verb"], payload["command"]
        if rng.random() < self.skill.wrong_verb:
            other = rng.choice([kind for kind in KINDS if kind.verb != verb])
            verb, command = other.verb, command_of(other, payload)
        if request.tools:
            return next_turn(request, [command])
        thinking = f"I use {verb}."
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
