"""Running a set of rollouts: concurrently, resumable, each exactly once.

Belongs here: which (task, sample) still runs, on how many threads, and retries. Does not belong here: a rollout itself
(`agent`), or the file they are kept in (`journal`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from etpi_assets.rollouts.journal import Journal
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord

Run = Callable[[Task, int], RolloutRecord]
"""One rollout of a task: (task, sample) -> record, whose id is `agent.rollout_id` under the journal's spec key."""

MODEL_CONCURRENCY = 64
"""Rollouts at once where a model acts: enough requests stand in line to fill its batches."""


def collect(
    tasks: Sequence[Task],
    k: int,
    run: Run,
    journal: Journal,
    *,
    concurrency: int,
    advance: Callable[[int], None] = lambda n: None,
) -> Iterator[RolloutRecord]:
    """`k` rollouts of every task; what the open journal holds is not run again. When all are finished, an iterator that
    reads them from the journal, ordered by task and sample.

    A rollout that comes back with an infrastructure error runs once more; the second outcome stands, whatever it is.
    `advance` hears of finished rollouts, those of the journal first. What `run` raises (no sandbox can work here, say)
    stops the collection: rollouts under way finish and are kept, the others are not begun.
    """
    wanted = [(task, sample) for task in tasks for sample in range(k)]
    missing = [(task, sample) for task, sample in wanted if not journal.holds(task, sample)]
    advance(len(wanted) - len(missing))

    stop = threading.Event()

    def one(task: Task, sample: int) -> None:
        if stop.is_set():
            return
        try:
            record = run(task, sample)
            if record.error is not None:
                record = run(task, sample)
            journal.append(record)
        except BaseException:
            stop.set()
            raise
        advance(1)

    with ThreadPoolExecutor(max(1, concurrency), thread_name_prefix="rollout") as pool:
        futures = [pool.submit(one, task, sample) for task, sample in missing]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for future in futures:
        future.result()
    return (journal.get(task, sample) for task, sample in wanted)
