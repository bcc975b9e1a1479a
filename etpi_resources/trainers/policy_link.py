"""Connects a trainer, which generates from the policy's weights, with the process that rolls the policy out.

Both sides are here, with the standard library alone: the trainer's (`connect`, PolicyClient), and that of the process
with tasks, sandboxes and rewards (PolicyServer). They exchange pickled tuples over a Unix socket in a folder that only
this user can open. The trainer starts every exchange:

    trainer  "roll_out", optimiser steps done, [task row, ...], Published or None
    server   "complete", number, requests                    if None: any number, several at the same time
    trainer  "completed", number, completions                or "failed", number, text
    server   "rolled_out", samples, seconds of publishing    or "stop", text

and, when the round was trained on for the first time,

    trainer  "trained", step as above, TokenStatistics
    server   "recorded",                                     or "stop", text
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from etpi_resources.engines import Completion, Engine, Request

ENGINE_THREADS = 64
"""Calls that the trainer's side runs at the same time; each takes a thread while it is generated."""

GAP_IN_FLOAT32, GAP_IN_HALF = 0.005, 0.2
"""Largest mean difference, in nats, that rounding explains between the log-prob a token was sampled with and the
trainer's: if both compute in float32, or if either computes in 16 bits. In 16 bits random models of 0.6B to 8B shapes
differ by up to 0.15, and by 0.28 if the temperature is 0.7 in place of 1 (bench/check_bounds.py)."""


def largest_gap(*dtypes: str) -> float:
    """Return the bound of that difference for computations in these dtypes, by any library's names."""
    return GAP_IN_FLOAT32 if set(dtypes) <= {"fp32", "float32", "float"} else GAP_IN_HALF


class LinkBroken(ConnectionError):
    """The other side closed the link, or stopped with a reason."""


class Link:
    """One side's connection; several threads may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()

    def send(self, *message: Any) -> None:
        """Raises LinkBroken if the other side has closed."""
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            raise LinkBroken(f"the other side closed the policy link: {error}") from error

    def receive(self) -> Any:
        """Return the next message; None if the other side has closed."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        with self._sending:
            self._connection.close()


# --- the side that rolls out -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fork:
    """A further branch of a rollout: its ids from index `start` on follow the id at index `after` (both in the prompt
    and the completion together), and those before it in its branch; -1 for a branch that shares nothing."""

    start: int
    after: int


@dataclass(frozen=True)
class Sample:
    """One rollout as the trainer sees it: the branches of its forest one after the other, each without the ids that an
    earlier one has.

    Attributes:
        prompt_ids: the first prompt. completion_ids: all ids after it, observations included.
        mask: 1 for ids that the policy generated. logprobs: of those ids, at the temperature and from the unrestricted
            distribution, 0.0 for observations. All three (n,).
        reward: the sum of the weighted rewards. advantage: group-relative.
        parsed, solved, called: 0 or 1, to be logged as shares (called: whether the policy called a tool).
        forks: the branches after the first, in order.
        ends: index of the last id of each agent, in the prompt and the completion together; empty: the last id.
        advantages: of each id of the completion, where agents have rewards of their own.
        left_out: why the rollout is in no loss; then the mask is 0. None: it is trained on.
        replaced: rollouts that it replaces: they broke, or their group had no variance.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]
    reward: float
    advantage: float
    parsed: float = 0.0
    solved: float = 0.0
    called: float = 0.0
    forks: Sequence[Fork] = ()
    ends: Sequence[int] = ()
    advantages: Sequence[float] | None = None
    left_out: str | None = None
    replaced: int = 0

    def branches(self) -> list[tuple[list[int], int]]:
        """Return of each branch the indices of its ids (in the prompt and the completion together), and how many of
        them are an earlier branch's."""
        starts = [0, *(fork.start for fork in self.forks)]
        ends = [*starts[1:], len(self.prompt_ids) + len(self.completion_ids)]
        branches: list[tuple[list[int], int]] = []
        for start, end, after in zip(starts, ends, [-1, *(fork.after for fork in self.forks)], strict=True):
            shared: list[int] = []
            if after >= 0:
                parent = bisect_right(starts, after) - 1
                indices, common = branches[parent]
                shared = indices[: common + after - starts[parent] + 1]
            branches.append(([*shared, *range(start, end)], len(shared)))
        return branches


@dataclass(frozen=True)
class TokenStatistics:
    """Figures that the trainer computed at each generated id of a round, before the first update on the round.

    Attributes:
        logprobs: of the id; entropies: of the distribution at the id, at the sampling temperature. Both in nats,
            little-endian float32, as bytes: the round's samples one after the other, and of each the ids whose mask
            is 1; NaN for a sample that is not in the loss. teacher: its log-probs likewise; empty without a teacher.
    """

    logprobs: bytes
    entropies: bytes
    teacher: bytes = b""


@dataclass(frozen=True)
class Published:
    """A version of the policy's weights, for servers to load.

    Attributes:
        folder: safetensors: all weights under the names of the base's files, or an adapter.
        logprobs: the policy's log-prob of each id of the probe but the first, at temperature 1, in nats.
    """

    folder: str
    adapter: bool
    logprobs: Sequence[float]


RollOut = Callable[[int, Sequence[int], Engine], Sequence[Sample]]
"""(optimiser steps done, rows of tasks, the policy) -> one sample per row, in order."""

Generate = Callable[[int, Published], AbstractContextManager[Engine]]
"""(optimiser steps done, the weights) -> an engine that generates from them."""

Record = Callable[[int, TokenStatistics], None]
"""(optimiser steps done when the round was generated, its statistics)."""


class PolicyServer:
    """Serves the requests of one trainer for rollouts until the trainer disconnects. A context manager.

    Args:
        record: keeps the statistics that the trainer sends; None ignores them.
        generating: opens the engine of published weights; without it, the trainer generates.

    Attributes:
        path: the socket, for the trainer's config.
        error: the exception that stopped the rollouts; the trainer then got "stop".
    """

    def __init__(
        self, roll_out: RollOut, name: str, record: Record | None = None, generating: Generate | None = None
    ) -> None:
        self._roll_out, self._record, self._name, self._generating = roll_out, record, name, generating
        self._folder = Path(tempfile.mkdtemp(prefix="etpi-policy-"))
        self.path = self._folder / "link"
        self.error: BaseException | None = None
        self._listener = Listener(str(self.path), "AF_UNIX")
        self._thread = threading.Thread(target=self._serve, name=f"policy link of {name}", daemon=True)

    def __enter__(self) -> PolicyServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):
            Client(str(self.path)).close()  # ends the wait for a trainer that never came
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        link = Link(self._listener.accept())
        policy = _RemotePolicy(link, self._name)
        # Closed from right to left: running rollouts fail with the policy, so the pool does not wait for them.
        with closing(link), ThreadPoolExecutor(1, thread_name_prefix="rollouts") as pool, closing(policy):
            while (message := link.receive()) is not None:
                kind, *content = message
                if kind == "roll_out":
                    pool.submit(self._answer, link, self._rolled_out, policy, *content)
                elif kind == "trained":
                    self._answer(link, self._recorded, *content)
                else:
                    policy.receive(kind, *content)

    def _answer(self, link: Link, work: Callable[..., tuple[Any, ...]], *arguments: Any) -> None:
        """Send what `work` returns, or why it failed: the trainer must not wait for ever."""
        try:
            link.send(*work(*arguments))
        except LinkBroken:
            pass  # the trainer has ended, and its own error says why
        except BaseException as error:
            self.error = error
            with suppress(LinkBroken):
                link.send("stop", f"{type(error).__name__}: {error}")

    def _rolled_out(
        self, policy: _RemotePolicy, step: int, rows: Sequence[int], published: Published | None
    ) -> tuple[Any, ...]:
        began = time.monotonic()
        opened: AbstractContextManager[Engine] = nullcontext(policy)
        if published is not None and self._generating is not None:
            opened = self._generating(step, published)
        with opened as engine:
            publish_seconds = time.monotonic() - began
            return "rolled_out", self._roll_out(step, rows, engine), publish_seconds

    def _recorded(self, step: int, statistics: TokenStatistics) -> tuple[Any, ...]:
        if self._record is not None:
            self._record(step, statistics)
        return ("recorded",)


class _RemotePolicy:
    """The trainer's policy as an Engine."""

    def __init__(self, link: Link, name: str) -> None:
        self.name, self._link = name, link
        self._waiting: dict[int, Future[list[Completion]]] = {}
        self._lock, self._next, self._closed = threading.Lock(), 0, False

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return a completion per request. Raises LinkBroken if the trainer is gone, or RuntimeError."""
        answer: Future[list[Completion]] = Future()
        with self._lock:
            if self._closed:
                raise LinkBroken("the trainer is gone")
            number, self._next = self._next, self._next + 1
            self._waiting[number] = answer
        self._link.send("complete", number, [_ids_alone(request) for request in requests])
        return [
            replace(completion, prompt_ids=list(request.prompt_ids))
            for request, completion in zip(requests, answer.result(), strict=True)
        ]

    def fingerprint(self) -> Mapping[str, Any]:
        return {"engine": "policy", "model": self.name}

    def receive(self, kind: str, number: int, content: Any) -> None:
        """Pass an answer of the trainer to the call that waits for it."""
        with self._lock:
            answer = self._waiting.pop(number)
        if kind == "completed":
            answer.set_result(content)
        else:
            answer.set_exception(RuntimeError(content))

    def close(self) -> None:
        """Let running rollouts fail instead of waiting for the trainer."""
        with self._lock:
            self._closed, waiting = True, list(self._waiting.values())
            self._waiting.clear()
        for answer in waiting:
            answer.set_exception(LinkBroken("the trainer is gone"))


def _ids_alone(request: Request) -> Request:
    """Return the request as the trainer gets it: without messages, and without data that only scripts may read."""
    if request.grammar is not None:
        raise ValueError(f"{request.request_id}: a policy in training does not support grammars")
    return replace(request, messages=(), tools=(), privileged={})


# --- the trainer's side ----------------------------------------------------------------------------------------------


@contextmanager
def connect(path: str) -> Iterator[PolicyClient]:
    """Connect the trainer to the socket `path`. Raises OSError if no server listens there."""
    with closing(PolicyClient(Link(Client(path)))) as client:
        yield client


class PolicyClient:
    """Requests rollouts, and generates their completions meanwhile.

    Attributes:
        publish_seconds: in which the servers loaded the last round's weights.
    """

    def __init__(self, link: Link) -> None:
        self._link, self.publish_seconds = link, 0.0
        self._pool = ThreadPoolExecutor(ENGINE_THREADS, thread_name_prefix="generate")

    def roll_out(self, step: int, rows: Sequence[int], policy: Engine | Published) -> Sequence[Sample]:
        """Return a sample per row, generated by an engine here, or by servers from the published weights.

        Raises:
            LinkBroken: the other side stopped; with the reason.
        """
        self._link.send("roll_out", step, list(rows), policy if isinstance(policy, Published) else None)
        while (message := self._link.receive()) is not None:
            kind, *content = message
            if kind == "complete" and not isinstance(policy, Published):
                self._pool.submit(self._complete, policy, *content)
            elif kind == "rolled_out":
                samples, self.publish_seconds = content
                return samples
            else:
                raise LinkBroken(f"the rollouts stopped at step {step}: {content[0]}")
        raise LinkBroken(f"the process that rolls out is gone at step {step}")

    def record(self, step: int, statistics: TokenStatistics) -> None:
        """Send a round's statistics; return once they are kept, so that no checkpoint is without them.

        Raises LinkBroken with the reason if the other side cannot keep them.
        """
        self._link.send("trained", step, statistics)
        kind, *reason = self._link.receive() or ("stop", "the process that rolls out is gone")
        if kind != "recorded":
            raise LinkBroken(f"the statistics of step {step} were not kept: {reason[0]}")

    def _complete(self, engine: Engine, number: int, requests: Sequence[Request]) -> None:
        try:
            completions = [replace(completion, prompt_ids=None) for completion in engine.complete(requests)]
            self._link.send("completed", number, completions)
        except Exception as error:  # the call that waits must not hang
            self._link.send("failed", number, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._link.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
