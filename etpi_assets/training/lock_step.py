"""Requests of concurrent rollouts, joined into batches that do not depend on timing.

Rollouts that share an engine run in threads, and a batching engine takes their requests as they come. The batch decides
the order of floating-point sums, so timing decides some tokens. Here a batch is complete when every rollout that has
not ended waits for an answer, and its requests are in the order of rollouts: the same rollouts give the same batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
    groups = [items[start : start + at_once] for start in range(0, len(items), at_once)]
    return [result for group in groups for result in _group_in_step(roll_out, group, engine)]


def _group_in_step(roll_out: Callable[[Item, Engine], Result], group: Sequence[Item], engine: Engine) -> list[Result]:
    step = _LockStep(engine, len(group))
    with ThreadPoolExecutor(len(group), thread_name_prefix="rollout") as pool:
        return list(pool.map(lambda place: step.run(roll_out, group[place], place), range(len(group))))


@dataclass
class _Call:
    """A rollout's requests that wait for the others'."""

    requests: Sequence[Request]
    completions: list[Completion] = field(default_factory=list)
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class _LockStep:
    """Joins the calls of rollouts that run side by side."""

    def __init__(self, engine: Engine, rollouts: int) -> None:
        self.engine = engine
        self._live = rollouts
        self._waiting: dict[int, _Call] = {}
        self._lock = threading.Lock()

    def run(self, roll_out: Callable[[Item, Engine], Result], item: Item, place: int) -> Result:
        """Run one rollout; the others do not wait for it once it has ended or failed."""
        try:
            return roll_out(item, EngineView(self.engine, partial(self.complete, place)))
        finally:
            self._end()

    def complete(self, place: int, requests: Sequence[Request]) -> list[Completion]:
        """Wait until every live rollout has requests; the last one runs the batch of all."""
        call = _Call(requests)
        with self._lock:
            self._waiting[place] = call
            batch = self._take_if_complete()
        self._answer(batch)
        call.done.wait()
        if call.error is not None:
            raise call.error
        return call.completions

    def _end(self) -> None:
        with self._lock:
            self._live -= 1
            batch = self._take_if_complete()
        self._answer(batch)

    def _take_if_complete(self) -> list[_Call]:
        if len(self._waiting) < self._live:
            return []
        batch = [call for _, call in sorted(self._waiting.items())]
        self._waiting = {}
        return batch

    def _answer(self, batch: Sequence[_Call]) -> None:
        if not batch:
            return
        try:
            completions = iter(self.engine.complete([request for call in batch for request in call.requests]))
            for call in batch:
                call.completions = [next(completions) for _ in call.requests]
        except BaseException as error:  # every rollout of the batch raises it
            for call in batch:
                call.error = error
        finally:
            for call in batch:
                call.done.set()
