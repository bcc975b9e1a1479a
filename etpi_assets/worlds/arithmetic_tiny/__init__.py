"""The family `arithmetic_tiny`: the last digit of a * b + c, which a tiny model cannot compute but one Python call can.

A guess is right one time in ten. It is a toy model: results on it describe the pipeline, not language models.

The payload of a task (JSON): expression, answer, and source and license, as in rows of `answers`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etpi_assets.agent.tools import INTERPRETER
from etpi_assets.tasks.answers import maths
from etpi_assets.tasks.family import ANSWER, BLIND, Family, RejectedInput, Task, Verdict, with_defaults
from etpi_assets.worlds.skill import PolicySkill
from etpi_resources.engines import Request
from etpi_resources.sandboxes import SandboxFactory

PARAMS: Mapping[str, Any] = {"train": 600, "heldout": 96, "sandbox": "bubblewrap"}
"""A suite's params and their defaults: tasks of each split, and the kind of sandbox their tools run in."""

_SOURCES = {"train": "drill", "heldout": "exam"}


class ArithmeticTiny(Family):
    """The family `arithmetic_tiny`."""

    params = PARAMS
    verdict_trust = BLIND
    feature_id = "question"

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """Yield tasks of both splits, without a repeated expression, deterministic in (suite, seed)."""
        chosen = with_defaults(suite, "arithmetic_tiny", params, PARAMS)
        rng = random.Random(f"{suite}/{seed}")
        seen: set[str] = set()
        for split, source in _SOURCES.items():
            for index in range(int(chosen[split])):
                while (expression := _expression(rng)) in seen:
                    pass
                seen.add(expression)
                yield _task(suite, split, source, index, expression)

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        (files,) = final.values()
        return maths.judge(task.payload["answer"], files.get(ANSWER, ""))

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        """Yield each task whose answer equals Python's value of its expression; else `reference_fails`."""
        with sandboxes.create({}) as sandbox:
            program = "\n".join(f"print({task.payload['expression']})" for task in tasks)
            sandbox.write_files({"all.py": program})
            digits = sandbox.run("python3 all.py").output.split()
        for task, digit in zip(tasks, digits, strict=True):
            wanted = task.payload["answer"]
            right = digit == wanted and maths.judge(wanted, maths.as_answer(digit)).reward == 1.0
            detail = f"{digit} is found, {wanted} wanted"
            yield task if right else RejectedInput(task.task_id, "reference_fails", detail)


FAMILY = ArithmeticTiny()


def _expression(rng: random.Random) -> str:
    return f"({rng.randint(12, 99)} * {rng.randint(12, 99)} + {rng.randint(12, 99)}) % 10"


def _task(suite: str, split: str, source: str, index: int, expression: str) -> Task:
    instruction = f"{expression} = ?"
    first, second, third = (int(word) for word in expression.replace("(", "").replace(")", "").split()[0:5:2])
    payload = {
        "expression": expression,
        "answer": str((first * second + third) % 10),
        "source": source,
        "license": "apache-2.0",
    }
    return Task.hashed(f"{suite}-{split}-{index:05d}", suite, source, split, instruction, payload)


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
    so far. By default it rarely calls its tool, and rarely calls it correctly.

    A call that prints the last digit gives the right answer, one that prints another remainder a wrong answer, and one
    that only assigns prints nothing, so the policy gives up. Without a call it guesses. Calls print the whole
    `\\boxed{}`: a model this small copies text after a known context, not a lone digit.
    """

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
