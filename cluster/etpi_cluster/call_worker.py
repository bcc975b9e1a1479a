"""The process on a node that runs the calls of `fan_out.ClusterExecutor`. It imports nothing of Ray by itself."""

from __future__ import annotations

import os
import pickle
import platform
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from etpi_cluster.code import code_hash


@dataclass(frozen=True)
class WorkerIdentity:
    """Identity that a worker sends before it gets work: its host, its process id, the hash of its code, and the paths
    that it does not see of those that its work reads."""

    host: str
    pid: int
    code: str
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a call: its value, or the exception that it raised and where."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


class CallWorker:
    """Runs calls in the threads of one process; Ray makes an actor of it."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def identify(self, plugins: Sequence[str], reads: Sequence[str]) -> WorkerIdentity:
        unseen = tuple(path for path in reads if not os.path.exists(path))
        return WorkerIdentity(platform.node(), os.getpid(), code_hash(*plugins), unseen)

    def call(self, function: Sequence[Any], arguments: bytes) -> bytes:
        """Return the pickled Outcome of one call.

        Args:
            function: a list with the reference of the pickled function, which is fetched once.
            arguments: the pickled tuple of its arguments.
        """
        try:
            return _pickled(Outcome(self._function(function[0])(*pickle.loads(arguments))))
        except BaseException as error:
            return _failure(error, traceback.format_exc())

    def _function(self, reference: Any) -> Callable[..., Any]:
        import ray

        with self._lock:
            name = reference.hex()
            if name not in self._functions:
                self._functions[name] = pickle.loads(ray.get(reference))
            return self._functions[name]


def _failure(error: BaseException, trace: str) -> bytes:
    """Return the outcome of an error; one that cannot be pickled becomes a RuntimeError with its text."""
    try:
        answer = _pickled(Outcome(error=error, trace=trace))
        pickle.loads(answer)
    except Exception:
        answer = _pickled(Outcome(error=RuntimeError(f"{type(error).__name__}: {error}"), trace=trace))
    return answer


def _pickled(value: Any) -> bytes:
    from ray.cloudpickle.cloudpickle_fast import dumps

    return dumps(value)
