"""Run a set of rollouts concurrently, with one retry, skipping those that the journal has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import suppress
from functools import partial
from threading import Event

from etpi_assets.rollouts.journal import Journal
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord

Run = Callable[[Task, int], RolloutRecord]
"""(task, sample) -> record, whose id is `agent.loop.rollout_id` with the journal's spec key. It can be pickled, unless
the executor runs it in this process."""

MODEL_CONCURRENCY = 64
"""Concurrent rollouts of a model: enough requests to fill its batches."""


def collect(
    tasks: Sequence[Task],
    k: int,
    run: Run,
    journal: Journal,
    *,
    executor: Executor,
    check: Callable[[], None] = lambda: None,
    advance: Callable[[int], None] = lambda n: None,
) -> Iterator[RolloutRecord]:
    """Run `k` rollouts of every task, except those in the journal; then yield all from it, by task and sample.

    A rollout with an infrastructure error runs once more, and its second record is kept. An exception of `run` (for
    example because no sandbox works) stops the collection: running rollouts finish, no others start, and those without
    an infrastructure error are kept.

    Args:
        executor: where rollouts run, and how many at once (`executors.rollout_executor`). The caller closes it. Only
            this process writes the journal.
        check: called after each finished rollout; an exception of it stops the collection too.
        advance: called with the number of finished rollouts, first with those of the journal.
    """
    pairs = [(task, sample) for task in tasks for sample in range(k)]
    missing = [(task, sample) for task, sample in pairs if not journal.has(task, sample)]
    advance(len(pairs) - len(missing))
    once = partial(run_with_retry, run)
    unfinished: set[Future[RolloutRecord]] = set()
    failed = Event()

    def cancel_others(finished: Future[RolloutRecord]) -> None:
        """Run in the thread that failed, before it takes the next rollout."""
        if not finished.cancelled() and finished.exception() is not None:
            failed.set()
            for future in tuple(unfinished):
                future.cancel()

    def keep(record: RolloutRecord) -> None:
        journal.append(record)
        advance(1)

    try:
        for task, sample in missing:
            future = executor.submit(once, task, sample)
            unfinished.add(future)
            future.add_done_callback(cancel_others)
            if failed.is_set():
                future.cancel()
                break
        for future in as_completed(unfinished):
            if future.cancelled():
                continue  # another one failed, and is among the next
            unfinished.discard(future)  # its record can be freed
            keep(future.result())
            check()
    except BaseException:
        for future in [future for future in unfinished if not future.cancel()]:
            with suppress(Exception):  # the first exception is the one to report
                if (record := future.result()).error is None:  # else its cause may be that the run is being stopped
                    keep(record)
        raise
    return (journal.get(task, sample) for task, sample in pairs)


def run_with_retry(run: Run, task: Task, sample: int) -> RolloutRecord:
    """Run a rollout, and once more if it ends with an infrastructure error, which may pass."""
    record = run(task, sample)
    return record if record.error is None else run(task, sample)
