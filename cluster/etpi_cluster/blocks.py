"""Compute blocks on the idle CPUs of a cluster's nodes: `process.pool.ordered_map`, where a cluster is configured.

One worker process computes here, on the CPU that the step's own job holds, so that the work goes on where no other CPU
is idle. Workers on CPUs that are idle, of every node that sees the files, take the other blocks, the first one first.
A block whose worker or node dies is computed again, by another worker or here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

import pyarrow as pa

from etpi_cluster.code import plugin_packages
from etpi_cluster.fan_out import ClusterExecutor, WorkerKind, WorkersDied
from etpi_cluster.session import CPU, SANDBOXES
from etpi_resources.process.pool import (
    BLOCKS_AHEAD,
    WORKERS_VARIABLE,
    Block,
    BlockFactory,
    LocalWorkers,
    Result,
    dumps,
    loads,
)  # fmt: skip

LINGER_SECONDS = 10.0
"""Time that a worker is kept while no block waits: the step may be writing results."""
DEATHS = 3
"""Number of workers that die under one block before it is considered the cause."""
AHEAD_OF_READY = 4
"""Workers for which blocks are read before they run, besides as many as run already; it bounds the blocks in memory."""

Log = Callable[[str], None]


def map_over_nodes(
    factory: BlockFactory[Block, Result],
    blocks: Iterable[tuple[str, Block]],
    workers: int,
    *,
    reads: Sequence[Path] = (),
    sandboxes: bool = False,
    log: Log | None = None,
) -> Iterator[Result]:
    """Yield the function's result for each (name, block), in their order; arguments and errors as `ordered_map`.

    Args:
        workers: the most processes, this node's included.

    Raises:
        BackendError: there is no connection, or a node runs other code.
        WorkersDied: `DEATHS` workers died under one block.
        WorkerDied: the worker on this node was killed.
    """
    kind = WorkerKind(
        CPU, SANDBOXES if sandboxes else "", calls=1, most=workers - 1, idle_only=True, linger=LINGER_SECONDS, tries=1,
        reads=tuple(map(str, reads)),
    )  # fmt: skip
    say = log or logging.getLogger(__name__).info
    executor = ClusterExecutor(kind, plugins=plugin_packages(), log=say)
    try:
        with LocalWorkers(factory, 1) as here:
            window = _Window(executor, here, factory)
            for name, block in blocks:
                window.add(name, block)
                if len(window) >= window.limit(workers):
                    yield window.first()
            while len(window):
                yield window.first()
            say(f"{window.elsewhere} of {window.number} blocks were computed on idle CPUs of the nodes")
    finally:
        executor.end()


@dataclass(eq=False)
class _Pending(Generic[Block]):
    """A block whose result is due."""

    name: str
    block: Block
    future: Future[Any]
    here: bool = False
    deaths: int = 0


@dataclass
class _Window(Generic[Block, Result]):
    """The blocks in memory, in order. All are offered to the cluster; the worker here takes the first not yet begun."""

    executor: ClusterExecutor
    here: LocalWorkers[Block, Result]
    factory: BlockFactory[Block, Result]
    number: int = 0
    elsewhere: int = 0
    _blocks: deque[_Pending[Block]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._compute = _Compute(dumps(self.factory))

    def __len__(self) -> int:
        return len(self._blocks)

    def limit(self, workers: int) -> int:
        ready = self.executor.ready
        return BLOCKS_AHEAD * (1 + min(workers - 1, 2 * ready + AHEAD_OF_READY))

    def add(self, name: str, block: Block) -> None:
        self.number += 1
        self._blocks.append(_Pending(name, block, self._offer(block)))
        self._feed()

    def first(self) -> Result:
        """Wait for the first block and return its result."""
        head = self._blocks[0]
        while not head.future.done():
            self._feed()
            busy = [pending.future for pending in self._blocks if pending.here]
            wait({head.future, *(future for future in busy if not future.done())}, return_when=FIRST_COMPLETED)
        try:
            result = head.future.result() if head.here else loads(head.future.result())
        except Exception as error:
            if self._offer_again(head):
                return self.first()
            if not head.here:
                error.add_note(f"in block {head.name}")
            raise
        self._blocks.popleft()
        self.elsewhere += not head.here
        return result

    def _offer(self, block: Block) -> Future[Any]:
        return self.executor.submit(self._compute, dumps(block))

    def _offer_again(self, pending: _Pending[Block]) -> bool:
        """Offer a block again whose worker died; return False if none died, or too many did."""
        if pending.here or not isinstance(pending.future.exception(), WorkersDied):
            return False
        pending.deaths += 1
        if pending.deaths == DEATHS:
            return False
        pending.future = self._offer(pending.block)
        return True

    def _feed(self) -> None:
        """Offer blocks of dead workers again; keep the worker here busy, with one block more waiting for it."""
        for pending in self._blocks:
            if pending.future.done() and pending.deaths < DEATHS:
                self._offer_again(pending)
        taken = sum(pending.here and not pending.future.done() for pending in self._blocks)
        for pending in self._blocks:
            if taken >= BLOCKS_AHEAD:
                return
            if not pending.here and pending.future.cancel():
                pending.here, pending.future = True, self.here.submit(pending.name, pending.block)
                taken += 1


class _Compute:
    """The function of a block on a worker, where it is made from the factory at the first block."""

    def __init__(self, factory: bytes) -> None:
        self._factory, self._function, self._lock = factory, None, threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Compute, (self._factory,)

    def __call__(self, block: bytes) -> bytes:
        with self._lock:
            if self._function is None:
                pa.set_cpu_count(1)
                os.environ |= {WORKERS_VARIABLE: "1", "TOKENIZERS_PARALLELISM": "false"}
                self._function = loads(self._factory)()
        return dumps(self._function(loads(block)))
