"""The family `running_sum`: add numbers that arrive one a turn. It tests whether state survives a conversation's turns.

`sh next` asks the host for the next number, then "end"; after each number the agent appends the sum so far to the file
`sums`. A turn gets one number, and only its observation shows it: no file and no program of the sandbox ever has it. So
the sum must come from the conversation.
It is a toy model: results on it describe the pipeline, not language models.

The payload of a task (JSON): `numbers`, in order. The family's numbers are in etpi_assets/planning/versions.toml.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from etpi_assets.agent.actions import SUBMIT, format_action
from etpi_assets.tasks.family import BLIND, Family, RejectedInput, Role, SandboxNeeds, Task, Verdict, with_defaults
from etpi_resources.engines import Request
from etpi_resources.engines.scripted import Policy
from etpi_resources.sandboxes import REPLY, Environment, SandboxFactory

PARAMS: Mapping[str, Any] = {"train": 600, "heldout": 160, "depth": 8, "largest": 4, "sandbox": "bubblewrap"}
"""A suite's params and their defaults: tasks of each split; the most numbers (depths
from 1 alternate); the largest number; the kind of sandbox that validates its tasks."""

INSTRUCTION = "Add numbers. sh next"
END = "end"
_NEXT = f'echo "{REPLY}"\n'


def state(total: int) -> str:
    """Return the command that states the sum so far and requests the next number."""
    return f"echo {total} >> sums; sh next"


class RunningSum(Family):
    """The family `running_sum`."""

    params = PARAMS
    verdict_trust = BLIND
    feature_id = "sum"

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        chosen = with_defaults(suite, "running_sum", params, PARAMS)
        for split in ("train", "heldout"):
            for index in range(int(chosen[split])):
                rng = random.Random(f"{suite}/{seed}/{split}/{index}")
                depth = index % int(chosen["depth"]) + 1
                payload = {"numbers": [rng.randint(1, int(chosen["largest"])) for _ in range(depth)]}
                repo = f"{split}_{index % 5}"
                yield Task.hashed(f"{suite}-{split}-{index:05d}", suite, repo, split, INSTRUCTION, payload)

    def needs(self, task: Task) -> SandboxNeeds:
        return SandboxNeeds(Environment(replies=(*map(str, task.payload["numbers"]), END)))

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return {"next": _NEXT, "sums": ""}

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Verdicts: passed (reward 1: exactly the right sums); no_patch (no sum stated), failed_tests, both 0.

        `details`: `depth`, the number of numbers, and `right`, the length of the correct prefix of sums."""
        (files,) = final.values()
        stated, wanted = files.get("sums", "").split(), [str(n) for n in accumulate(task.payload["numbers"])]
        right = next((i for i, (a, b) in enumerate(zip(stated, wanted, strict=False)) if a != b), None)
        right = min(len(stated), len(wanted)) if right is None else right
        details = {"depth": len(wanted), "right": right}
        if stated == wanted:
            return Verdict(1.0, "passed", details)
        return Verdict(0.0, "failed_tests" if stated else "no_patch", details)

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        return ["sh next", *(state(total) for total in accumulate(task.payload["numbers"]))]

    def scripted_policy(self, skill: Mapping[str, float], seed: int) -> Policy:
        """Return the policy of an engine of kind "scripted"."""
        return RunningSumPolicy(skill)


FAMILY = RunningSum()


_STATED = re.compile(re.escape(state(0)).replace("0", r"(\d+)"))
_NUMBER = re.compile(rf"^(\d+|{END})$", re.MULTILINE)


class RunningSumPolicy:
    """Run `sh next` first, then state the last sum plus the last number, and submit after "end". Has no skill.

    It reads only the conversation, not the payload, so a history that is cut in the wrong place leads to wrong sums.
    """

    def __init__(self, skill: Mapping[str, float]) -> None:
        if skill:
            raise ValueError(f"engine.skill: unknown {sorted(skill)}; the teacher of running_sum has no skill to set")

    def __call__(self, request: Request) -> str:
        contents = [message["content"] for message in request.messages if message["role"] != "system"]
        numbers, stated = _NUMBER.findall(contents[-1]), _STATED.findall("\n".join(contents))
        if not numbers:
            return str(format_action("sh next"))
        if numbers[-1] == END:
            return str(format_action(f"echo {SUBMIT}"))
        return str(format_action(state(int(stated[-1] if stated else 0) + int(numbers[-1]))))
