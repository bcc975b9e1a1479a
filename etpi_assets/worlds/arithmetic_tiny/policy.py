"""The scripted policy of `arithmetic_tiny`: by default it rarely calls its tool, and rarely calls it correctly.

A call that prints the last digit gives the right answer, one that prints another remainder a wrong answer, and one that
only assigns prints nothing, so the policy gives up. Without a call it guesses. Calls print the whole `\\boxed{}`: a
model this small copies text after a known context, not a lone digit.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from etpi_assets.agent.tools import INTERPRETER
from etpi_assets.worlds.skill import PolicySkill
from etpi_resources.engines import Request

GIVEN_UP = "I cannot tell."


@dataclass(frozen=True)
class ArithmeticSkill(PolicySkill):
    """Probabilities of the policy's choices.

    Attributes:
        calls: a rollout calls the tool.
        prints: a call prints its result.
        exact: a call computes the last digit, else the remainder by 9.
        again: after a call that showed nothing, the tool is called once more.
    """

    calls: float = 0.3
    prints: float = 0.5
    exact: float = 0.1
    again: float = 0.2


class ArithmeticTinyPolicy:
    """Scripted policy: `policy(request)` answers the task in `request.privileged["payload"]`, given the tool's output
    so far."""

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
    """Return a tool call in Hermes form."""
    body = json.dumps({"name": INTERPRETER, "arguments": {"code": code}})
    return f"<tool_call>\n{body}\n</tool_call>"


def answer(digit: str) -> str:
    return f"\\boxed{{{digit}}}"
