"""A scripted teacher of arithmetic that seldom calls its tool, and seldom well.

Belongs here: what it answers, and how often which way. Does not belong here: turning text into ids (the scripted
engine), or the tasks. A call that prints the result leads to the right answer; one that only assigns it shows nothing,
and the teacher gives up. Without a call it guesses.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields

from etpi_assets.rollouts.tools import INTERPRETER
from etpi_resources.engines import Request

GIVEN_UP = "I cannot tell."


@dataclass(frozen=True)
class ArithmeticSkill:
    """Probabilities.

    Attributes:
        calls: a rollout calls the tool.
        prints: a call prints what it computes.
        again: after a call that showed nothing, the tool is called once more.
    """

    calls: float = 0.3
    prints: float = 0.05
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
            return answer(printed.strip())
        return self._call(request, rng) if rng.random() < self.skill.again else GIVEN_UP

    def _call(self, request: Request, rng: random.Random) -> str:
        expression = request.privileged["payload"]["expression"]
        return call(f"print({expression})" if rng.random() < self.skill.prints else f"n = {expression}")


def call(code: str) -> str:
    """A call of the tool in Hermes form."""
    body = json.dumps({"name": INTERPRETER, "arguments": {"code": code}})
    return f"<tool_call>\n{body}\n</tool_call>"


def answer(digit: str) -> str:
    return f"\\boxed{{{digit}}}"
