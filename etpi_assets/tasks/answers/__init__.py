"""The family `answers`: mathematical questions judged by the boxed result, programming questions judged by tests.

`rows` reads the questions (licences, balanced sampling), `maths` and `programs` judge. The agent's last message
(`action_format = "tool_or_answer"`) is in the file ANSWER.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etpi_assets.tasks.answers import maths, programs
from etpi_assets.tasks.answers.rows import balanced, read_questions
from etpi_assets.tasks.family import (
    ANSWER,
    BLIND,
    REFERENCE_RUNS,
    UNCHALLENGED,
    FilesFamily,
    RejectedInput,
    SandboxNeeds,
    Task,
    Verdict,
    proved,
)
from etpi_assets.tasks.proof import prove
from etpi_resources.sandboxes import Limits, SandboxFactory

PARAMS: Mapping[str, Any] = {
    "sandbox": "bubblewrap",
    "path": None,
    "split": "train",
    "sources": (),
    "per_source": None,
    "licenses": {},
    "unproven": False,
    "grader": "hardened",
    "command_seconds": 20,
    "memory_gib": 1,
}
"""path: a file or folder of rows (.jsonl, .json, .parquet), see `rows`. split: of all tasks. sources: only these.
per_source: rows sampled from each source with the suite's seed; none: all. licenses: source -> licence, for rows
that state none. unproven: also take programs without a reference solution; their tests must still fail for an empty
program. grader: of mathematical answers, "hardened", or "published", as math-verify says (`maths`).
command_seconds, memory_gib: limits of a tool call and of a test."""


class Answers(FilesFamily):
    """The family `answers`."""

    name, data = "answers", "the rows (.jsonl, .json, .parquet)"
    params = PARAMS
    feature_id = "question"
    repo_is_source = True

    def read_path(self, suite: str, seed: int, path: Path, chosen: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """Yield a task or a rejection for each row. Sources alternate, so that the first N tasks are balanced too.

        Raises ValueError for a source with fewer rows than `per_source`."""
        if chosen["grader"] not in maths.GRADERS:
            raise ValueError(f"suite {suite}: params.grader is one of {', '.join(maths.GRADERS)}")
        items = list(read_questions(suite, path, chosen))
        yield from (item for item in items if isinstance(item, RejectedInput))
        yield from balanced([item for item in items if isinstance(item, Task)], chosen["per_source"], seed)

    def needs(self, task: Task) -> SandboxNeeds:
        return SandboxNeeds(limits=limits_of(task))

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Judge the answer: passed (reward 1), or wrong_answer, failed_tests or no_answer (reward 0)."""
        (files,) = final.values()
        return judge_text(task, files.get(ANSWER, ""), sandboxes)

    def trusts(self, task: Task) -> Sequence[str]:
        return [BLIND] if _check_of(task) is None else super().trusts(task) or [UNCHALLENGED]

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        """Yield each task, with the calibration of its `check` if it has one, or its rejection.

        A program runs REFERENCE_RUNS times; comparing answers is deterministic."""
        for task in tasks:
            trial, reference = _check_of(task), task.payload["reference"]
            if trial is not None and trial.solution is not None:
                yield prove(task, [trial], sandboxes)
            elif not reference and not task.payload["unproven"]:
                remedy = "name a reference program in the row's `solution`, or set params.unproven = true"
                yield RejectedInput(task.task_id, "no_reference", f"nothing proves its tests; {remedy}")
            else:
                program = task.payload["kind"] == "program"
                runs = (REFERENCE_RUNS if program else 1) if reference else 0
                verdicts = [judge_text(task, reference, sandboxes) for _ in range(runs)]
                null = judge_text(task, programs.EMPTY if program else "", sandboxes)
                yield proved(task, [each for each in verdicts if each.reward != 1], null=null.reward == 1)


FAMILY = Answers()


def judge_text(task: Task, text: str, sandboxes: SandboxFactory) -> Verdict:
    if task.payload["kind"] != "program":
        verdict = maths.judge(task.payload["answer"], text, task.payload.get("grader", "hardened"), task.instruction)
        return replace(verdict, details={**verdict.details, "verdict_trust": BLIND})
    return programs.judge(task.payload["tests"], text, limits_of(task), sandboxes, task.payload)


def _check_of(task: Task) -> programs.CheckTrial | None:
    """Return the trial of a program's `check`; None for other tasks."""
    if task.payload["kind"] != "program" or "test" not in task.payload["tests"]:
        return None
    return programs.CheckTrial(task.payload["tests"], task.payload["reference"], limits_of(task))


def limits_of(task: Task) -> Limits:
    limits = task.payload["limits"]
    return Limits(command_seconds=float(limits["command_seconds"]), memory_bytes=int(limits["memory_gib"] * (1 << 30)))
