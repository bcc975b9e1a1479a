"""Requests of concurrent rollouts, joined into batches that do not depend on timing.

Rollouts that share an engine run in threads, and a batching engine takes their requests as they come. The batch decides
the order of floating-point sums, so timing decides some tokens. Here a batch is complete when every rollout that has
not ended waits for an answer, and its requests are in the order of rollouts: the same rollouts give the same batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from etpi_resources.engines import Completion, Engine, EngineView, Request

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_step(
    roll_out: Callable[[Item, Engine], Result], items: Sequence[Item], engine: Engine, at_once: int
) -> list[Result]:
    """Return `roll_out(item, engine)` of every item, in order, `at_once` rollouts side by side.

    A group of rollouts ends before the next begins, since otherwise timing would decide which rollouts share a batch.

    Raises:
        Exception: the error of the first item that failed.
    """
    results: list[Result] = []
    for start in range(0, len(items), at_once):
        group = items[start : start + at_once]
        step = _LockStep(engine, len(group))
        with ThreadPoolExecutor(len(group), thread_name_prefix="rollout") as pool:
            results += pool.map(partial(step.run, roll_out), group, range(len(group)))
    return results


class _LockStep:
    """Joins the calls of rollouts that run side by side."""

    def __init__(self, engine: Engine, rollouts: int) -> None:
        self.engine, self._live = engine, rollouts
        self._waiting: dict[int, tuple[Sequence[Request], Future[list[Completion]]]] = {}
        self._lock = threading.Lock()

    def run(self, roll_out: Callable[[Item, Engine], Result], item: Item, place: int) -> Result:
        """Run one rollout; the others do not wait for it once it has ended or failed."""
        try:
            return roll_out(item, EngineView(self.engine, partial(self.complete, place)))
        finally:
            with self._lock:
                self._live -= 1
            self._answer_if_complete()

    def complete(self, place: int, requests: Sequence[Request]) -> list[Completion]:
        """Wait until every live rollout has requests; the last one runs the batch of all."""
        answer: Future[list[Completion]] = Future()
        with self._lock:
            self._waiting[place] = requests, answer
        self._answer_if_complete()
        return answer.result()

    def _answer_if_complete(self) -> None:
        with self._lock:
            if not self._waiting or len(self._waiting) < self._live:
                return
            batch, self._waiting = [call for _, call in sorted(self._waiting.items())], {}
        try:
            completions = iter(self.engine.complete([request for requests, _ in batch for request in requests]))
            answers = [[next(completions) for _ in requests] for requests, _ in batch]
        except BaseException as error:  # every rollout of the batch raises it
            for _, answer in batch:
                answer.set_exception(error)
            return
        for (_, answer), completed in zip(batch, answers, strict=True):
            answer.set_result(completed)
