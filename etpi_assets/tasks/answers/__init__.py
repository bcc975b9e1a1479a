"""Questions with an answer: mathematics by the boxed result, programming by tests, from one table of rows or several.

Belongs here: the family as the rest of etpi knows it. Its parts are `rows` (reading, licences, balanced sampling),
`maths` and `programs` (verdicts). An agent answers in words (`action_format = "tool_or_answer"`); the last of them are
in ANSWER.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etpi_assets.specs.paths import expand
from etpi_assets.tasks.answers import maths, programs
from etpi_assets.tasks.answers.rows import balanced, read_questions
from etpi_assets.tasks.family import ANSWER, RejectedInput, Role, SandboxNeeds, Task, Verdict, with_defaults
from etpi_resources.sandboxes import Limits, SandboxFactory

PARAMS: Mapping[str, Any] = {
    "sandbox": "bubblewrap",
    "path": None,
    "split": "train",
    "sources": (),
    "per_source": None,
    "licenses": {},
    "unproven": False,
    "command_seconds": 20,
    "memory_gib": 1,
}
"""path: a file or folder of rows (.jsonl, .json, .parquet), see `rows`. split: of all tasks. sources: only these.
per_source: so many rows of each source, drawn by the suite's seed; none: all. licenses: source -> licence, for rows
that state none. unproven: take programs whose row has no reference solution; their tests must still fail for no
program. command_seconds, memory_gib: what a call of a tool, and a test, may use."""

REFERENCE_RUNS = 3
"""A reference program passes so many times, or the task is refused."""


class Answers:
    """The family `answers`."""

    invents_names = False

    def sandbox(self, params: Mapping[str, Any]) -> str | None:
        return {**PARAMS, **params}["sandbox"]

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """A task or a refusal a row, sources in turn, so that the first N tasks are balanced too.

        Raises:
            ValueError: unknown params, no path, or a source with fewer rows than `per_source`. FileNotFoundError: no
                rows at the path.
        """
        chosen = with_defaults(suite, "answers", params, PARAMS)
        if not chosen["path"]:
            raise ValueError(f"suite {suite}: params.path has to name the rows (.jsonl, .json, .parquet)")
        found = list(read_questions(suite, expand(str(chosen["path"])), chosen))
        yield from (item for item in found if isinstance(item, RejectedInput))
        yield from balanced([item for item in found if isinstance(item, Task)], chosen["per_source"], seed)

    def roles(self, task: Task) -> Sequence[Role]:
        return [Role("agent1", "question", task.instruction)]

    def needs(self, task: Task) -> SandboxNeeds:
        return SandboxNeeds(limits=limits_of(task))

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return {}

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """passed (reward 1); wrong_answer, failed_tests or no_answer (0)."""
        (files,) = final.values()
        return judge_text(task, files.get(ANSWER, ""), sandboxes)

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        """None: an answer is words, not commands; `rows` keeps a reference for `validate`."""
        return []

    def entities(self, task: Task) -> Sequence[str]:
        return []

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        """Each task whose reference passes (a program's REFERENCE_RUNS times; a comparison of answers has no chance in
        it) and whose empty answer fails; else the refusal no_reference, reference_fails or null_passes."""
        for task in tasks:
            yield self._proven(task, sandboxes) or task

    def _proven(self, task: Task, sandboxes: SandboxFactory) -> RejectedInput | None:
        reference = task.payload["reference"]
        for run in range(REFERENCE_RUNS if task.payload["kind"] == "program" and reference else bool(reference)):
            verdict = judge_text(task, reference, sandboxes)
            if verdict.reward != 1.0:
                return RejectedInput(
                    task.task_id, "reference_fails", f"run {run + 1}: {verdict.verdict} {verdict.details}"
                )
        if not reference and not task.payload["unproven"]:
            remedy = "name a reference program in the row's `solution`, or set params.unproven = true"
            return RejectedInput(task.task_id, "no_reference", f"nothing proves its tests; {remedy}")
        null = programs.EMPTY if task.payload["kind"] == "program" else ""
        if judge_text(task, null, sandboxes).reward == 1.0:
            return RejectedInput(task.task_id, "null_passes", "the empty answer passes")
        return None


FAMILY = Answers()


def judge_text(task: Task, text: str, sandboxes: SandboxFactory) -> Verdict:
    """The verdict on an answer's text."""
    if task.payload["kind"] == "program":
        return programs.judge(task.payload["tests"], text, limits_of(task), sandboxes)
    return maths.judge(task.payload["answer"], text)


def limits_of(task: Task) -> Limits:
    """What a sandbox of the task may use."""
    found = task.payload["limits"]
    return Limits(command_seconds=float(found["command_seconds"]), memory_bytes=int(found["memory_gib"] * (1 << 30)))
