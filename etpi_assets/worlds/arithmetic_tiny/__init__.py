"""The family `arithmetic_tiny`: the last digit of a * b + c, which a tiny model cannot compute but one Python call can.

A guess is right one time in ten. It is a toy model: results on it describe the pipeline, not language models.

The payload of a task (JSON): expression, answer, and source and license, as in rows of `answers`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etpi_assets.tasks.answers import maths
from etpi_assets.tasks.family import ANSWER, BLIND, Family, RejectedInput, Task, Verdict, with_defaults
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
