"""An executor whose calls run on the nodes of a Ray cluster, as many at once as the nodes offer slots.

It has the interface of `concurrent.futures.Executor`, so code that takes a thread pool takes this. A worker process is
a Ray actor that takes its slots of a node's resource, so several steps share the nodes' slots; each slot is a thread.
ROLLOUTS take `etpi_sandbox`, several to a process: a rollout mostly waits for child processes and servers. They hold no
CPU, because a step that computes on the node is placed by CPUs. `blocks` takes a CPU for each process.

A worker that dies takes its unfinished calls with it. They run again elsewhere; finished ones do not. A worker process
has the environment of its node, so keys of services come from there and never travel.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from etpi_cluster.call_worker import CallWorker, Outcome, WorkerIdentity
from etpi_cluster.code import code_hash
from etpi_cluster.session import CPU, SANDBOXES, RayNode, connect, free_of, nodes
from etpi_resources.backend import BackendError

STARTS = 3
"""Failed starts of workers on a node before the node is refused."""
SCAN_SECONDS = 2.0
"""Interval of listing nodes, to use those that joined."""
NO_NODE_SECONDS = 300.0
"""Time that calls wait for a node, when all nodes with slots are gone."""
QUIET_SECONDS = 15.0
"""A wait for slots that other steps hold is logged after this time."""
_WAIT_SECONDS = 0.2

Log = Callable[[str], None]


class WorkersDied(RuntimeError):
    """Workers died under a call again and again; the message names the call's last node and the remedy."""


class OtherCode(BackendError):
    """A node runs other code than this run; the message names the node, both hashes and the remedy."""


@dataclass(frozen=True)
class WorkerKind:
    """Resources of an executor's workers, and their start and end.

    Attributes:
        resource: Ray's resource, of which a call takes one.
        also: a resource that a node must offer too, of which nothing is taken; "": none.
        calls: slots of one process. A scripted rollout keeps its process busy for less than an eighth of its time.
        most: how many workers may run, all nodes together; None: as many as the nodes offer.
        idle_only: start workers only where the resource is free now, and let calls wait as long as it is nowhere free;
            else workers wait until other steps release it, and it is an error if no node offers it.
        linger: seconds that a worker without calls is kept.
        tries: how many workers may die under one call before it counts as the cause.
        reads: files and folders that a node must see; one that does not is not used.
    """

    resource: str = SANDBOXES
    also: str = ""
    calls: int = 8
    most: int | None = None
    idle_only: bool = False
    linger: float = 0.0
    tries: int = 4
    reads: tuple[str, ...] = ()


ROLLOUTS = WorkerKind()


@dataclass
class _Call:
    future: Future[Any]
    function: Any
    arguments: bytes
    tries: int = 0


@dataclass(eq=False)
class _Worker:
    """One process on a node. `starting` is the reference of its identity until it has answered."""

    actor: Any
    node: RayNode
    slots: int
    starting: Any
    running: dict[Any, _Call] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)

    @property
    def free(self) -> int:
        return 0 if self.starting is not None else self.slots - len(self.running)


class ClusterExecutor(Executor):
    """Runs calls on every node that offers the resource. The functions and arguments are pickled, a function once.

    Args:
        plugins: packages besides etpi's whose code must be the same on every node.
        code: the hash that nodes must have; by default this process's.
        log: called from another thread with a line when nodes join, die, or are refused.

    Raises:
        BackendError: there is no connection, or no node offers the resource.
    """

    def __init__(
        self, kind: WorkerKind = ROLLOUTS, *, plugins: Sequence[str] = (), code: str | None = None, log: Log = print
    ) -> None:
        self._ray = connect()
        self._kind, self._resource, self._plugins, self._log = kind, kind.resource, tuple(plugins), log
        self._code = code or code_hash(*plugins)
        self._queue: deque[_Call] = deque()
        self._workers: list[_Worker] = []
        self._starts: Counter[str] = Counter()
        self._refused: set[str] = set()
        self._functions: dict[int, tuple[Any, Any]] = {}
        self._closing, self._ending, self._waited = False, False, time.monotonic()
        self._started, self._told = time.monotonic(), False
        offering = self._offering()
        if not offering and not kind.idle_only:
            raise BackendError(
                f"no node of the Ray cluster offers {self._resource}, as none of the {len(nodes())} nodes says that it "
                "has it or that it works there. Start a node that does (docs/cluster.md); `etpi cluster doctor` says "
                "why the others do not"
            )
        self._first = {node.node_id for node in offering}
        self._thread = threading.Thread(target=self._manage, name="cluster-executor", daemon=True)
        self._thread.start()

    def _offering(self) -> list[RayNode]:
        names = {self._resource, self._kind.also} - {""}
        return [node for node in nodes() if all(map(node.offers, names))]

    @property
    def places(self) -> dict[str, int]:
        """Slots by node, of the nodes that offer the resource now."""
        return {node.name: node.offers(self._resource) for node in self._offering()}

    @property
    def ready(self) -> int:
        """Return the number of running workers."""
        return sum(worker.starting is None for worker in tuple(self._workers))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue `fn(*args)`; no keyword arguments.

        Raises:
            RuntimeError: the executor is closed.
        """
        if self._closing or kwargs:
            raise RuntimeError("the executor is closed" if self._closing else "calls on a cluster take no keywords")
        from ray.cloudpickle.cloudpickle_fast import dumps

        if id(fn) not in self._functions:  # the function is kept, so no other one gets its id
            self._functions[id(fn)] = (fn, self._ray.put(dumps(fn)))
        future: Future[Any] = Future()
        self._queue.append(_Call(future, self._functions[id(fn)][1], dumps(args)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and end the workers when those under way are finished."""
        if cancel_futures:
            for call in tuple(self._queue):
                call.future.cancel()
        self._closing = True
        if wait:
            self._thread.join()

    def end(self) -> None:
        """End the workers at once; calls under way get no result."""
        self._ending = True
        self.shutdown()

    # --- the thread that manages the workers -------------------------------------------------------------------------

    def _manage(self) -> None:
        scanned = 0.0
        try:
            while not self._ending and not (self._closing and not self._queue and not self._under_way()):
                while self._queue and self._queue[0].future.cancelled():
                    self._queue.popleft()
                if self._queue and time.monotonic() - scanned >= SCAN_SECONDS:
                    self._use_nodes()
                    scanned = time.monotonic()
                self._dispatch()
                self._release_idle()
                if self._collect():
                    scanned = 0.0  # a worker died: another is needed
        except BaseException as error:  # else the caller would wait for ever
            self._fail(error, also_running=True)
        finally:
            for worker in tuple(self._workers):
                self._drop(worker)

    def _under_way(self) -> int:
        return sum(len(worker.running) for worker in self._workers)

    def _use_nodes(self) -> None:
        """Start missing workers while calls wait: first one on each node."""
        offering = [node for node in self._offering() if node.node_id not in self._refused]
        if offering or self._workers:
            self._waited = time.monotonic() if offering else self._waited
        elif time.monotonic() - self._waited > NO_NODE_SECONDS and not self._kind.idle_only:
            self._fail(
                BackendError(
                    f"no node has offered {self._resource} for {NO_NODE_SECONDS:.0f} s: all nodes with sandboxes are "
                    "gone. Finished rollouts are kept; start a node and run again"
                )
            )
        if self._workers and all(worker.starting is not None for worker in self._workers):
            if not self._told and time.monotonic() - self._started > QUIET_SECONDS:
                self._told = True
                self._log(
                    f"{len(self._queue)} calls wait for {self._resource}: other steps hold all of it, on every node"
                )
        else:
            self._started, self._told = time.monotonic(), False
        wanted = len(self._queue) + self._under_way() - sum(worker.slots for worker in self._workers)
        free = free_of(self._resource) if self._kind.idle_only else {node.node_id: math.inf for node in offering}
        for worker in self._workers:
            free[worker.node.node_id] = free.get(worker.node.node_id, 0) - (worker.starting is not None) * worker.slots
        for number in range(max((self._processes(node) for node in offering), default=0)):
            for node in offering:
                slots = self._slots(node, number)
                existing = sum(worker.node.node_id == node.node_id for worker in self._workers)
                room = self._kind.most is None or len(self._workers) < self._kind.most
                if slots and wanted > 0 and room and existing <= number and free.get(node.node_id, 0) >= slots:
                    self._start(node, slots)
                    wanted -= slots
                    free[node.node_id] -= slots

    def _processes(self, node: RayNode) -> int:
        return -(-node.offers(self._resource) // self._kind.calls)

    def _slots(self, node: RayNode, number: int) -> int:
        """Return the number of slots of a node's worker of this number; 0 if it has no such worker."""
        processes, total = self._processes(node), node.offers(self._resource)
        return total // processes + (number < total % processes) if number < processes else 0

    def _start(self, node: RayNode, slots: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        amounts = (
            {"num_cpus": slots} if self._resource == CPU else {"num_cpus": 0, "resources": {self._resource: slots}}
        )
        options = self._ray.remote(
            **amounts,
            max_concurrency=slots + 1,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        )
        actor = options(CallWorker).remote()
        self._workers.append(_Worker(actor, node, slots, actor.identify.remote(self._plugins, self._kind.reads)))

    def _dispatch(self) -> None:
        """Give queued calls to the workers with most free slots."""
        while self._queue and (free := [worker for worker in self._workers if worker.free > 0]):
            worker = max(free, key=lambda w: w.free / w.slots)
            call = self._queue.popleft()
            if call.tries or call.future.set_running_or_notify_cancel():
                call.tries += 1
                worker.used = time.monotonic()
                worker.running[worker.actor.call.remote([call.function], call.arguments)] = call

    def _release_idle(self) -> None:
        """End workers that have nothing to do, so that other steps get their slots."""
        if not self._queue:
            since = time.monotonic() - self._kind.linger
            for worker in [w for w in self._workers if not w.running and w.used <= since]:
                self._drop(worker)

    def _collect(self) -> bool:
        """Wait a moment for answers; return whether a worker died."""
        references = {r: w for w in self._workers for r in (w.running or ([w.starting] if w.starting else []))}
        if not references:
            time.sleep(_WAIT_SECONDS / 4)
            return False
        ready, _ = self._ray.wait(list(references), num_returns=len(references), timeout=0)
        if not ready:
            ready, _ = self._ray.wait(list(references), num_returns=1, timeout=_WAIT_SECONDS)
        died = False
        for reference in ready:
            worker = references[reference]
            if worker in self._workers:
                died |= not self._answer(worker, reference)
        return died

    def _answer(self, worker: _Worker, reference: Any) -> bool:
        """Take one answer of a worker; return False if the worker is dead."""
        try:
            value = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._bury(worker, error)
            return False
        if isinstance(value, WorkerIdentity):
            worker.starting = None
            self._admit(worker, value)
            return True
        call = worker.running.pop(reference)
        worker.used = time.monotonic()
        self._finish(call, worker, value)
        return True

    def _finish(self, call: _Call, worker: _Worker, answer: bytes) -> None:
        outcome: Outcome = pickle.loads(answer)
        if outcome.error is None:
            call.future.set_result(outcome.value)
            return
        outcome.error.add_note(f"on node {worker.node.name}:\n{outcome.trace}")
        call.future.set_exception(outcome.error)

    def _admit(self, worker: _Worker, identity: WorkerIdentity) -> None:
        """Refuse a worker with other code. If its node was there at the start, the run stops; otherwise the node is
        not used."""
        self._starts[worker.node.node_id] = 0
        if identity.code == self._code:
            if identity.unseen:
                self._refused.add(worker.node.node_id)
                self._drop(worker)
                self._log(f"node {worker.node.name} does not see {identity.unseen[0]}, so it is not used")
            return
        error = OtherCode(
            f"node {worker.node.name} runs other code (hash {identity.code}) than this run ({self._code}). Install "
            "the same version of etpi, its plugins and its SQL on every node (the same image, or the same checkout), "
            "restart Ray there, and run again: finished work is kept"
        )
        self._refuse(worker, error)

    def _bury(self, worker: _Worker, error: Exception) -> None:
        """Queue the calls of a dead worker again, ahead of the others."""
        calls = list(worker.running.values())
        self._drop(worker)
        if worker.starting is not None:
            self._starts[worker.node.node_id] += 1
            if self._starts[worker.node.node_id] >= STARTS and worker.node.node_id in {n.node_id for n in nodes()}:
                reason = _first_line(error)
                self._refuse(worker, BackendError(f"node {worker.node.name}: no worker starts there: {reason}"))
            return
        self._log(
            f"node {worker.node.name}: a worker died ({_first_line(error)}); {len(calls)} unfinished calls run again "
            "elsewhere"
        )
        for call in reversed(calls):
            if call.tries < self._kind.tries:
                self._queue.appendleft(call)
                continue
            call.future.set_exception(
                WorkersDied(
                    f"{call.tries} workers died under the same call, the last on node {worker.node.name}: "
                    f"{_first_line(error)}. The node may have run out of memory: see Ray's logs there, offer less of "
                    f"{self._resource} on it, and run again; finished work is kept"
                )
            )

    def _refuse(self, worker: _Worker, error: BackendError) -> None:
        self._drop(worker)
        if worker.node.node_id in self._refused:
            return
        self._refused.add(worker.node.node_id)
        if worker.node.node_id in self._first:
            self._fail(error)
        else:
            self._log(f"{error}. The node joined after the start, so the others go on without it")

    def _drop(self, worker: _Worker) -> None:
        with suppress(ValueError):
            self._workers.remove(worker)
        with suppress(Exception):  # it may be dead
            self._ray.kill(worker.actor)

    def _fail(self, error: BaseException, *, also_running: bool = False) -> None:
        """Give the error to all queued calls; those under way finish."""
        running = [call for worker in self._workers for call in worker.running.values()] if also_running else []
        while self._queue:
            call = self._queue.popleft()
            if call.tries or call.future.set_running_or_notify_cancel():
                running.append(call)
        if not running:
            self._log(str(error))
        for call in running:
            if not call.future.done():
                call.future.set_exception(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
