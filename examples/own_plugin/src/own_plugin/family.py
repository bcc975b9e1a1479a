"""Tasks that ask for the lines of a file in order. The judge reads one file and compares it with the sorted lines."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etpi_assets.tasks.batch_validation import validate_in_batches
from etpi_assets.tasks.family import RejectedInput, Role, SandboxNeeds, Task, Verdict, with_defaults
from etpi_resources.hashes import json_hash
from etpi_resources.sandboxes import SandboxFactory

PARAMS: Mapping[str, Any] = {"train": 8, "heldout": 4, "lines": 5, "sandbox": "bubblewrap"}
INSTRUCTION = "Write the lines of the file input.txt in alphabetical order into the file output.txt."


class SortedLines:
    """The family `sorted_lines`; a task's payload has its `lines`."""

    invents_names = False

    def sandbox(self, params: Mapping[str, Any]) -> str | None:
        return str({**PARAMS, **params}["sandbox"])

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        chosen = with_defaults(suite, "sorted_lines", params, PARAMS)
        for split in ("train", "heldout"):
            for index in range(int(chosen[split])):
                payload = {"lines": _words(f"{suite}/{seed}/{split}/{index}", int(chosen["lines"]))}
                name = f"{suite}-{split}-{index:03d}"
                digest = json_hash([payload, INSTRUCTION])
                yield Task(name, suite, f"{split}_{index % 3}", split, INSTRUCTION, payload, digest)

    def roles(self, task: Task) -> Sequence[Role]:
        return [Role("agent1", "sort", task.instruction)]

    def needs(self, task: Task) -> SandboxNeeds:
        return SandboxNeeds()

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return {"input.txt": _text(task.payload["lines"])}

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        (files,) = final.values()
        written = files.get("output.txt")
        if written is None:
            return Verdict(0.0, "no_patch", {})
        wanted = _text(sorted(task.payload["lines"]))
        return Verdict(1.0, "passed", {}) if written == wanted else Verdict(0.0, "failed_tests", {"written": written})

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        return ["LC_ALL=C sort input.txt > output.txt"]

    def entities(self, task: Task) -> Sequence[str]:
        return ("input.txt", "output.txt")

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        (role,) = self.roles(tasks[0])
        return validate_in_batches(
            tasks,
            lambda task: self.workspace(task, role),
            lambda task: "\n".join(self.solve(task, role)),
            lambda task, files: self.judge(task, {role.agent_id: files}, sandboxes),
            sandboxes,
        )


def _words(seed: str, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefgh", k=4)) for _ in range(count)]


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


FAMILY = SortedLines()
