"""Run a set of rollouts concurrently, with one retry, skipping those that the journal has.

They run in threads of this process, or on the nodes of a cluster (`rollout_executor`). Their records are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from itertools import product
from threading import RLock
from urllib.parse import urlsplit

from etpi_assets.agent.loop import RolloutRuntime
from etpi_assets.rollouts.journal import Journal
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.backend import backend
from etpi_resources.engines import Engine, EngineUnavailable

Run = Callable[[Task, int], RolloutRecord]
"""(task, sample) -> record, whose id is `agent.loop.rollout_id` with the journal's spec key. It can be pickled, unless
the executor runs it in this process."""

MODEL_CONCURRENCY = max(64, min(8 * (os.cpu_count() or 1), 128))
"""Concurrent rollouts of a model: enough requests to fill its batches, and no more sandboxes than the cores can start
together."""


def collect(
    tasks: Iterable[Task],
    k: int,
    runs: Sequence[tuple[Run, Journal]],
    *,
    executor: Executor,
    check: Callable[[], None] = lambda: None,
    advance: Callable[[int], None] = lambda n: None,
) -> Iterator[RolloutRecord]:
    """Run `k` rollouts of every task by every run, except those in its journal; then yield all from the journals, by
    run, task and sample.

    A rollout with an infrastructure error runs once more, and its second record is kept. An exception of `run` (for
    example because no sandbox works) stops the collection: running rollouts finish, no others start, and those without
    an infrastructure error are kept.

    Args:
        tasks: may still be proved while rollouts of the first ones run.
        runs: each with its own journal, which only this process writes.
        executor: where rollouts run, and how many at once (`rollout_executor`). The caller closes it.
        check: called after each finished rollout; an exception of it stops the collection too.
        advance: called with the number of finished rollouts, first with those of the journals.
    """
    taken = list[Task]()
    unfinished: dict[Future[RolloutRecord], Journal] = {}
    failed, submitting = list[Future[RolloutRecord]](), RLock()

    def cancel_others(finished: Future[RolloutRecord]) -> None:
        """Run in the thread that failed, before it takes the next rollout."""
        if not finished.cancelled() and finished.exception() is not None:
            with submitting:  # else one that is submitted now, and not yet in `unfinished`, would start
                failed.append(finished)
                for future in tuple(unfinished):
                    future.cancel()

    def keep(record: RolloutRecord, journal: Journal) -> None:
        journal.append(record)
        advance(1)

    def finish(futures: Iterable[Future[RolloutRecord]]) -> None:
        for future in futures:
            if future.cancelled():
                continue  # another one failed, and is among the next
            journal = unfinished.pop(future)  # its record can be freed
            keep(future.result(), journal)
            check()

    try:
        for task in tasks:
            taken.append(task)
            for (run, journal), sample in product(runs, range(k)):
                if journal.has(task, sample):
                    advance(1)
                    continue
                with submitting:
                    if failed:
                        break
                    future = executor.submit(run_with_retry, run, task, sample)
                    unfinished[future] = journal
                    future.add_done_callback(cancel_others)
            if failed:
                break
            finish([future for future in unfinished if future.done()])
        finish(as_completed(tuple(unfinished)))
    except BaseException:
        for future in [future for future in unfinished if not future.cancel()]:
            with suppress(Exception):  # the first exception is the one to report
                if (record := future.result()).error is None:  # else its cause may be that the run is being stopped
                    keep(record, unfinished[future])
        raise
    return (journal.get(task, sample) for _, journal in runs for task in taken for sample in range(k))


def run_with_retry(run: Run, task: Task, sample: int) -> RolloutRecord:
    """Run a rollout, and once more if it ends with an infrastructure error, which may pass."""
    record = run(task, sample)
    return record if record.error is None else run(task, sample)


HOST_SANDBOXES = ("bubblewrap", "docker")
"""Sandboxes with processes. The others are dictionaries in this process and gain nothing from a cluster."""

Log = Callable[[str], None]


@contextmanager
def rollout_executor(runtime: RolloutRuntime, threads: int, log: Log) -> Iterator[Executor]:
    """Open the executor of a collection: the nodes of the cluster if there is one and the engine can be used there,
    otherwise this many threads.

    An engine in this process (transformers) keeps its rollouts, sandboxes included, on this machine: its batches join
    the requests of all rollouts, and a request for every turn over the network would be one more thing to fail.

    Raises:
        BackendError: no node offers sandboxes, or there is no connection.
        EngineUnavailable: the caller's, with the reason why the engine's servers ended, if they did.
    """
    elsewhere = backend() if runtime.sandboxes.name in HOST_SANDBOXES else None
    if elsewhere is not None and (reason := _stays(runtime.engine, elsewhere.addresses())):
        log(f"rollouts run on this node alone: {reason}")
        elsewhere = None
    if elsewhere is None:
        with ThreadPoolExecutor(max(1, threads), thread_name_prefix="rollout") as pool:
            yield pool
        return
    with elsewhere.calls(log) as executor:
        try:
            yield executor
        except EngineUnavailable as error:  # a node sees that no server answers, and not why
            if reason := getattr(runtime.engine, "exit_reason", lambda: None)():
                raise EngineUnavailable(f"{reason}\nFinished rollouts are kept; run it again") from error
            raise


def _stays(engine: Engine, addresses: list[str]) -> str:
    """Return why an engine cannot be used from nodes of these addresses; "" if it can."""
    if not getattr(engine, "portable", False):
        return f"the engine {engine.name} computes in this process"
    local = [url for url in getattr(engine, "urls", ()) if _is_loopback(urlsplit(url).hostname or "")]
    if local and not all(map(_is_loopback, addresses)):
        return f"{local[0]} is an address of this node alone; write the host's name in engine.urls to use every node"
    return ""


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
