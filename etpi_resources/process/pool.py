"""Compute the blocks of a table in worker processes, in order and in bounded memory.

`ordered_map` is the whole interface. On one machine the workers are processes of it; where a cluster is configured they
are on the idle CPUs of its nodes (`cluster.blocks`). A worker is a fresh interpreter, so threads, locks and torch of
this process do not matter to it. It gets a factory once, and then block after block. The workers run under the
supervisor: they end with this process, however it ends.

Protocol: frames of an 8-byte length and a pickle, on the worker's stdin and stdout. The first frame is the factory;
each later one is (name, block), and is answered by (True, result) or (False, error, traceback). All other output of a
worker goes to stderr.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import queue
import struct
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import pyarrow as pa

from etpi_resources.backend import backend
from etpi_resources.process.supervise import supervised

WORKERS_VARIABLE = "ETPI_WORKERS"
"""Environment variable with the number of worker processes; 1 computes in this process. It changes no results."""

START_SECONDS = 12.0
"""Work of one core, in seconds, that is worth a worker: to load a large tokenizer takes a third of it."""
BLOCKS_AHEAD = 2
"""Blocks for each worker that are read but not yet returned."""

_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from etpi_resources.process.pool import work; work()"
_ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
}

Block = TypeVar("Block")
Result = TypeVar("Result")
BlockFactory = Callable[[], Callable[[Block], Result]]
"""Returns the function of a block. It is called once in each worker, so it can be pickled; the function need not be."""


class WorkerDied(RuntimeError):
    """A worker process ended in the middle of a block; the message names the block and the remedy."""


def worker_count() -> int:
    """Return the number of worker processes: `ETPI_WORKERS`, or one for each core of this process.

    Raises:
        ValueError: the variable is not a number of at least 1.
    """
    text = os.environ.get(WORKERS_VARIABLE)
    if not text:
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{WORKERS_VARIABLE} is {text!r}: set it to a number of processes, 1 for none beside this one")
    return int(text)


def workers_for(seconds: float) -> int:
    """Return the number of worker processes for work of `seconds` estimated single-core seconds.

    It is one for every START_SECONDS of work, at most `worker_count`. On a cluster this node's cores are no bound: work
    that is worth several workers goes to the idle CPUs of all nodes, less stays in this process.
    """
    most = sys.maxsize if backend() and not os.environ.get(WORKERS_VARIABLE) else worker_count()
    return max(1, min(most, int(seconds / START_SECONDS)))


def ordered_map(
    factory: BlockFactory[Block, Result],
    blocks: Iterable[tuple[str, Block]],
    *,
    workers: int | None = None,
    reads: Sequence[Path] = (),
    sandboxes: bool = False,
    log: Callable[[str], None] | None = None,
) -> Iterator[Result]:
    """Yield the function's result for each (name, block), in their order, for any number of workers and nodes.

    Blocks are read as workers need them: `BLOCKS_AHEAD` for each worker are in memory. Blocks, results and the factory
    are pickled. Closing the iterator ends the workers.

    Args:
        workers: number of processes, by default `worker_count`; 1 computes in this process and pickles nothing.
        reads: files and folders that the function uses; a node of the cluster that does not see them is not used.
        sandboxes: whether the function starts some; a node of the cluster where they do not work is not used.
        log: takes a line when nodes of the cluster join, die or are not used.

    Raises:
        WorkerDied: a worker was killed. On a cluster, blocks of workers on other nodes are computed again instead.
        BackendError: the machines of the cluster cannot be used.
        Exception: an error of the function; its notes name the block and have the worker's traceback.
    """
    count = worker_count() if workers is None else workers
    if count == 1:
        compute = factory()
        for name, block in blocks:
            try:
                yield compute(block)
            except Exception as error:
                error.add_note(f"in block {name}")
                raise
        return
    if elsewhere := backend():
        yield from elsewhere.map_blocks(factory, blocks, count, reads=reads, sandboxes=sandboxes, log=log)
        return
    with LocalWorkers(factory, count) as pool:
        yield from in_order((pool.submit(name, block) for name, block in blocks), BLOCKS_AHEAD * count)


def in_order(futures: Iterable[Future[Result]], ahead: int) -> Iterator[Result]:
    """Yield the results of futures in their order; `ahead` of them are taken from the iterable at a time."""
    waiting: deque[Future[Result]] = deque()
    for future in futures:
        waiting.append(future)
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class LocalWorkers(Generic[Block, Result]):
    """The processes, started as blocks arrive, and a thread for each that waits for its answers."""

    def __init__(self, factory: BlockFactory[Block, Result], count: int) -> None:
        self._factory = dumps(factory)
        self._count, self._processes = count, list[subprocess.Popen[bytes]]()
        self._prepared: set[int] = set()  # pids of those that have the factory
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="etpi-pool")

    def __enter__(self) -> LocalWorkers[Block, Result]:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for process in self._processes:
            if kind is not None:
                process.terminate()  # a thread that waits for its answer reads the end of the stream
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.close()  # tells a worker to end
            process.wait()
            process.stdout.close()

    def submit(self, name: str, block: Block) -> Future[Result]:
        if len(self._processes) < self._count:
            self._processes.append(self._start())
            self._idle.put(self._processes[-1])
        return self._threads.submit(self._answer, name, block)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _MAIN, json.dumps([path for path in sys.path if path])]
        return subprocess.Popen(
            supervised(command, grace=1.0),
            env={**os.environ, **_ONE_THREAD, WORKERS_VARIABLE: "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _answer(self, name: str, block: Block) -> Result:
        """Give an idle worker the block and return its answer; called in a thread."""
        process = self._idle.get()
        try:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):  # a worker that was killed: reading its answer says so
                if process.pid not in self._prepared:
                    self._prepared.add(process.pid)
                    _send(process.stdin, self._factory)
                _send(process.stdin, dumps((name, block)))
            answer = _receive(process.stdout)
        finally:
            self._idle.put(process)
        if answer is None:
            raise WorkerDied(
                f"block {name}: the worker process {process.pid} was killed; the machine may have run out of memory. "
                f"Run it again with fewer processes ({WORKERS_VARIABLE}=1 for none)"
            )
        done, result, *trace = answer
        if done:
            return result
        result.add_note(f"in block {name}, in a worker process:\n{trace[0]}")
        raise result


def work() -> None:
    """Run a worker: compute the blocks that stdin brings."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    pa.set_cpu_count(1)
    requests = sys.stdin.buffer
    compute: Callable[[Any], Any] | None = None
    factory: BlockFactory[Any, Any] | None = None
    try:
        factory = _receive(requests)
        while (request := _receive(requests)) is not None:
            try:
                assert factory is not None
                compute = compute or factory()
                answer = dumps((True, compute(request[1])))
            except Exception as error:
                answer = _failure(error)
            _send(answers, answer)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)
    os._exit(0)  # nothing is left to write, and freeing every object takes a while


def _failure(error: Exception) -> bytes:
    """Return the answer for an error; one that cannot be pickled becomes a RuntimeError with its text."""
    trace = traceback.format_exc()
    try:
        answer = dumps((False, error, trace))
        pickle.loads(answer)
    except Exception:
        answer = dumps((False, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return answer


class _Pickler(pickle.Pickler):
    """Pickles an Arrow table as the rows it shows; by itself, a slice is pickled with all of its parent's buffers."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, pa.Table):
            return NotImplemented
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, obj.schema) as writer:
            writer.write_table(obj)
        return _table, (pickle.PickleBuffer(sink.getvalue()),)


def _table(data: Any) -> pa.Table:
    return pa.ipc.open_stream(pa.py_buffer(data)).read_all()


def dumps(value: Any) -> bytes:
    """Pickle a block, a result or a factory; `loads` returns it."""
    sink = io.BytesIO()
    _Pickler(sink, protocol=5).dump(value)
    return sink.getvalue()


def loads(data: bytes) -> Any:
    return pickle.loads(data)


def _send(stream: IO[bytes], payload: bytes) -> None:
    stream.write(struct.pack("<Q", len(payload)))
    stream.write(payload)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """Return the next value, None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    (length,) = struct.unpack("<Q", head)
    payload = stream.read(length)
    return pickle.loads(payload) if len(payload) == length else None
