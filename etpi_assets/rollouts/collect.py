"""Run a set of rollouts concurrently, with one retry, skipping those that the journal has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from etpi_assets.rollouts.journal import Journal
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord

Run = Callable[[Task, int], RolloutRecord]
"""(task, sample) -> record, whose id is `agent.loop.rollout_id` with the journal's spec key."""

MODEL_CONCURRENCY = 64
"""Concurrent rollouts of a model: enough requests to fill its batches."""


def collect(
    tasks: Sequence[Task],
    k: int,
    run: Run,
    journal: Journal,
    *,
    concurrency: int,
    advance: Callable[[int], None] = lambda n: None,
) -> Iterator[RolloutRecord]:
    """Run `k` rollouts of every task, except those in the journal; then yield all from it, by task and sample.

    A rollout with an infrastructure error runs once more, and its second record is kept. An exception of `run` (for
    example because no sandbox works) stops the collection: running rollouts finish and are kept, no others start.

    Args:
        advance: called with the number of finished rollouts, first with those of the journal.
    """
    pairs = [(task, sample) for task in tasks for sample in range(k)]
    missing = [(task, sample) for task, sample in pairs if not journal.has(task, sample)]
    advance(len(pairs) - len(missing))

    stop = threading.Event()

    def run_one(task: Task, sample: int) -> None:
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
        futures = [pool.submit(run_one, task, sample) for task, sample in missing]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for future in futures:
        future.result()
    return (journal.get(task, sample) for task, sample in pairs)
