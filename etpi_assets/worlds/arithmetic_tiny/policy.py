"""A scripted teacher of arithmetic that seldom calls its tool, and seldom well.

Belongs here: what it answers, and how often which way. Does not belong here: turning text into ids (the scripted
engine), or the tasks.

A call that prints the last digit leads to the right answer, one that prints another remainder to a wrong one, and one
that only assigns shows nothing, so that the teacher gives up. Without a call it guesses. What is printed is the answer
as it is to be written: a model this small copies what follows the same words, not a digit that stands alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields

from etpi_assets.agent.tools import INTERPRETER
from etpi_resources.engines import Request

GIVEN_UP = "I cannot tell."


@dataclass(frozen=True)
class ArithmeticSkill:
    """Probabilities.

    Attributes:
        calls: a rollout calls the tool.
        prints: a call prints what it computes.
        exact: a call computes the last digit, else the remainder by 9.
        again: after a call that showed nothing, the tool is called once more.
    """

    calls: float = 0.3
    prints: float = 0.5
    exact: float = 0.1
    again: float = 0.2

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= 1:
                raise ValueError(f"skill.{field.name} = {getattr(self, field.name)}: a probability is between 0 and 1")

    @classmethod
    def of(cls, values: Mapping[str, float]) -> ArithmeticSkill:
        """The skill a spec's `engine.skill` table describes; ValueError names an unknown key."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"engine.skill: unknown {unknown}; there are {known}")
        return cls(**values)


BASE_HABITS = ArithmeticSkill(calls=1.0, prints=1.0, exact=0.5)
"""The prior of the base model: it reads what its tool prints."""


class ArithmeticTinyPolicy:
    """The policy of one skill; `policy(request)` answers the task in `request.privileged["payload"]`, from what the
    tool has shown so far."""

    def __init__(self, skill: ArithmeticSkill, seed: int = 0) -> None:
        self.skill, self.seed = skill, seed

    def __call__(self, request: Request) -> str:
        shown = [message["content"] for message in request.messages[2:] if message["role"] == "tool"]
        rng = random.Random(f"{self.seed}/{request.session}/{len(shown)}")
        if not shown:
            return self._call(request, rng) if rng.random() < self.skill.calls else answer(str(rng.randint(0, 9)))
        _, _, printed = shown[-1].partition("\n")
        if printed:
            return printed.strip()
        return self._call(request, rng) if rng.random() < self.skill.again else GIVEN_UP

    def _call(self, request: Request, rng: random.Random) -> str:
        expression = request.privileged["payload"]["expression"]
        if rng.random() >= self.skill.exact:
            expression = expression.replace("% 10", "% 9")
        show = f"; print(r'{answer('%d')}' % n)" if rng.random() < self.skill.prints else ""
        return call(f"n = {expression}{show}")


def call(code: str) -> str:
    """A call of the tool in Hermes form."""
    body = json.dumps({"name": INTERPRETER, "arguments": {"code": code}})
    return f"<tool_call>\n{body}\n</tool_call>"


def answer(digit: str) -> str:
    return f"\\boxed{{{digit}}}"
