"""Proofs as a job: a suite's tasks are proved on all cores, and each finished proof is a file of the lake's scratch.

A file is named for the task's content and the versions of judge, family and sandbox: a killed run continues after it,
and suites that have the task share it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter

from etpi_assets.asset import AssetRun
from etpi_assets.graph import GRAPH
from etpi_assets.planning.versions import judge_of, versions_of
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import CALIBRATIONS, UNPROVEN_REASONS, WHY_UNPROVEN, Family, RejectedInput, Task
from etpi_resources.hashes import json_hash
from etpi_resources.lake.files import write_atomically
from etpi_resources.process.pool import ordered_map, worker_count, workers_for
from etpi_resources.sandboxes import SandboxFactory

BATCH = 40
"""Small tasks that are proved in one sandbox."""
SECONDS = 15.0
"""Estimated seconds of a proof before any was measured."""


@dataclass(frozen=True)
class Prover:
    """Proves tasks, or finds their finished proofs; worker processes get a pickled copy of it.

    Attributes:
        folder: of the finished proofs of this family, judge and kind of sandbox.
    """

    family: Family
    sandboxes: SandboxFactory
    folder: Path

    @classmethod
    def of(cls, run: AssetRun, suite: str) -> Prover | None:
        """Return the prover of a suite; None if its tasks have no environments."""
        spec = run.specs.suites[suite]
        family = load_family(spec.family)
        if (kind := family.sandbox(spec.params)) is None:
            return None
        kept = versions_of(GRAPH["tasks"], suite, run.specs).kept or {}
        code = {name: number for name, number in kept.items() if not name.startswith("judge")}
        versions = json_hash([spec.family, judge_of(spec.family), code, kind])
        folder = run.lake.scratch("proofs") / versions[:16]
        return cls(family, run.resources.sandboxes(kind), folder)

    def __call__(self) -> Callable[[Sequence[Task]], list[Task | RejectedInput]]:
        """Return the function of a worker process."""
        return self.prove

    def finished(self, task: Task) -> Task | RejectedInput | None:
        """Return the outcome of a finished proof; None if there is none."""
        try:
            proof = json.loads(self._file(task).read_text("utf-8"))
        except FileNotFoundError:
            return None
        if "rejected" in proof:
            return RejectedInput(**{**proof["rejected"], "source": task.task_id})
        stored = {CALIBRATIONS: proof["calibrations"]} if proof["calibrations"] else {}
        return replace(task, payload={**task.payload, **stored})

    def prove(self, tasks: Sequence[Task]) -> list[Task | RejectedInput]:
        """Return each task with its calibrations, or its rejection, in order. A lack of this machine is not stored."""
        known = {task.task_id: self.finished(task) for task in tasks}
        missing, start = [task for task in tasks if known[task.task_id] is None], perf_counter()
        for task, outcome in zip(missing, self.family.validate(missing, self.sandboxes), strict=True):
            known[task.task_id] = outcome
            proof = {"seconds": perf_counter() - start}
            if isinstance(outcome, Task):
                proof |= {"calibrations": outcome.payload.get(CALIBRATIONS)}
            elif outcome.reason != "no_environment":
                proof |= {"rejected": asdict(outcome)}
            if len(proof) > 1:
                write_atomically(self._file(task), json.dumps(proof))
            start = perf_counter()
        return [outcome for task in tasks if (outcome := known[task.task_id]) is not None]

    def forget_rejections(self, tasks: Sequence[Task]) -> None:
        """Remove the stored rejections of a blocked suite, so that the next run proves these tasks again."""
        for task in tasks:
            if isinstance(self.finished(task), RejectedInput):
                self._file(task).unlink()

    def outcomes(self, tasks: Iterable[Task], expected: int, run: AssetRun) -> Iterator[Task | RejectedInput]:
        """Yield the outcomes of tasks in order, as they are proved on all cores."""
        size = 1 if self.family.keeps_proofs else BATCH
        workers = min(worker_count(), expected) if self.family.keeps_proofs else workers_for(expected * 0.1)
        for proved in ordered_map(
            self, _blocks(tasks, size), workers=max(1, workers), reads=[self.folder.parent], sandboxes=True,
            log=run.log,
        ):  # fmt: skip
            yield from proved

    def seconds(self) -> float:
        """Return the median seconds of a finished proof; SECONDS without any."""
        files = list(self.folder.glob("*.json"))[:200]
        return median(json.loads(file.read_text("utf-8"))["seconds"] for file in files) if files else SECONDS

    def _file(self, task: Task) -> Path:
        return self.folder / f"{json_hash([task.task_id, task.content_hash])[:32]}.json"


def _blocks(tasks: Iterable[Task], size: int) -> Iterator[tuple[str, list[Task]]]:
    rest = iter(tasks)
    while block := list(islice(rest, size)):
        yield block[0].task_id, block


@dataclass
class Proving:
    """The first `limit` proved tasks of a suite, proved as they are first taken where the suite says proof = "ahead".

    Attributes:
        tasks: those that were taken so far; all of them once `finished`.
        rejected: those that could not be proved.
    """

    run: AssetRun
    suite: str
    offered: Sequence[Task]
    limit: int | None = None
    tasks: list[Task] = field(default_factory=list)
    rejected: list[RejectedInput] = field(default_factory=list)
    finished: bool = False

    def __iter__(self) -> Iterator[Task]:
        if self.finished:
            yield from self.tasks
            return
        self.tasks, self.rejected = [], []
        for outcome in self._outcomes():
            if isinstance(outcome, Task):
                self.tasks.append(outcome)
                yield outcome
            else:
                self.rejected.append(outcome)
            if len(self.tasks) == self.limit:
                break
        self.finished = True
        if self.rejected or self.limit not in (None, len(self.tasks)):
            self.run.log(f"{self.run.label}: {len(self.tasks)} proved tasks; {len(self.rejected)} could not be proved")

    @property
    def expected(self) -> int:
        """The number of tasks if all can be proved."""
        return min(len(self.offered), self.limit or len(self.offered))

    def _outcomes(self) -> Iterator[Task | RejectedInput]:
        spec = self.run.specs.suites[self.suite]
        prover = Prover.of(self.run, self.suite) if spec.proof == "ahead" else None
        if prover is None:
            return iter(self.offered)
        outcomes = prover.outcomes(self.offered, self.expected, self.run)
        pairs = zip(self.offered, outcomes, strict=False)
        return (kept_unproven(outcome, task, spec.params) for task, outcome in pairs)


def kept_unproven(outcome: Task | RejectedInput, task: Task, params: object) -> Task | RejectedInput:
    """Return a rejected task as one that is run without a verdict, where the suite keeps those."""
    keeps = isinstance(params, dict) and params.get("keep_unproven")
    if isinstance(outcome, Task) or not keeps or outcome.reason not in UNPROVEN_REASONS:
        return outcome
    payload = {**task.payload, WHY_UNPROVEN: f"{outcome.reason}: {outcome.detail}"}
    return replace(task, payload=payload, content_hash=json_hash([task.content_hash, WHY_UNPROVEN]))
