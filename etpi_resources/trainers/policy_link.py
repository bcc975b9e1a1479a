"""Connects a trainer, which generates from the policy's weights, with the process that rolls the policy out.

Both sides are here, with the standard library alone: the trainer's (`connect`, PolicyClient), and that of the process
with tasks, sandboxes and rewards (PolicyServer). They exchange pickled tuples over a Unix socket in a folder that only
this user can open. The trainer starts every exchange:

    trainer  "roll_out", number, step, [task row, ...], version, Published or None
    server   "load", number, version                         if None, and rounds are rolled out ahead
    server   "complete", number, requests                    if None: any number, several at the same time
    trainer  "answer", number, completions                   or "failed", number, text
    server   "answer", number, (samples, seconds of loading)

where `step` is the optimiser steps done when the round is trained on, and `version` those done by its weights,

and, when the round was trained on for the first time,

    trainer  "trained", number, step, statistics
    server   "answer", number, None

Each side numbers its requests. If the server cannot answer one, it sends "stop", text.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
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
    """One side's connection. Several threads may send and ask; one thread reads, by `requests`."""

    def __init__(self, connection: Connection, other: str) -> None:
        self._connection, self._other, self._sending = connection, other, threading.Lock()
        self._asked: dict[int, Future[Any]] = {}
        self._numbers, self._lock, self._ended = count(), threading.Lock(), ""

    def send(self, *message: Any) -> None:
        """Raises LinkBroken if the other side has closed."""
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            raise LinkBroken(f"the other side closed the policy link: {error}") from error

    def ask(self, kind: str, *content: Any) -> Future[Any]:
        """Send a request and return its answer: LinkBroken once the other side has closed or stopped."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            if self._ended:
                answer.set_exception(LinkBroken(self._ended))
                return answer
            self._asked[number] = answer
        self.send(kind, number, *content)
        return answer

    def requests(self) -> Iterator[tuple[Any, ...]]:
        """Yield the other side's requests and pass on its answers, until it closes or stops."""
        ended = f"{self._other} is gone"
        with suppress(EOFError, OSError):
            while True:
                kind, number, *content = message = self._connection.recv()
                if kind == "stop":
                    ended = number
                    break
                if kind == "answer":
                    self._asked.pop(number).set_result(*content)
                elif kind == "failed":
                    self._asked.pop(number).set_exception(RuntimeError(*content))
                else:
                    yield message
        with self._lock:
            self._ended = ended
        for answer in self._asked.values():
            answer.set_exception(LinkBroken(ended))

    def close(self) -> None:
        with self._sending:
            self._connection.close()

    def end(self) -> None:
        """End both sides' `requests`; closing alone leaves a thread here that waits in it."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


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
        truncated: the share of its agents whose last turn was cut at a length limit.
        forks: the branches after the first, in order.
        advantages: of each id of the completion, where agents have rewards of their own.
        left_out: why the rollout is in no loss; then the mask is 0. None: it is trained on.
        replaced: rollouts that it replaces: they broke, or their group had no variance.
        version: optimiser steps done by the oldest weights that generated a turn; None: by those it is trained with.
        teacher_logprobs: of each id of the completion, by a served teacher, as `logprobs`; None: there is none.
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
    truncated: float = 0.0
    forks: Sequence[Fork] = ()
    advantages: Sequence[float] | None = None
    left_out: str | None = None
    replaced: int = 0
    version: int | None = None
    teacher_logprobs: Sequence[float] | None = None


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
"""(optimiser steps done when the round is trained on, rows of tasks, the policy) -> one sample per row, in order."""

Generate = Callable[[int, Published], AbstractContextManager[Engine]]
"""(optimiser steps done, the weights) -> an engine that generates from them."""

Record = Callable[[int, bytes], None]
"""(step of the round, the figures that the trainer computed before the first update on it), as rows of little-endian
float32 in nats: log-probs and entropies (and the log-probs of a teacher) at the sampling temperature, of the ids whose
mask is 1, sample by sample; NaN for a sample that is not in the loss."""


Complete = Callable[[Sequence[Request]], list[Completion]]


class _Policy:
    """The policy as an engine of changing weights. They change between turns, while none is generated, and never to
    older ones; a completion has the version that generated it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._complete: Complete | None = None
        self._version = self._running = self._loads = 0
        self._turns = threading.Condition()

    @contextmanager
    def loaded(self, version: int, opened: AbstractContextManager[Complete]) -> Iterator[float]:
        """Have the policy generate from these weights or newer ones; yield the seconds that loading took."""
        with ExitStack() as stack:
            with self._turns:
                self._loads += 1
                try:
                    self._turns.wait_for(lambda: self._running == 0)
                    began = time.monotonic()
                    if self._complete is None or version > self._version:
                        self._complete = None
                        self._complete, self._version = stack.enter_context(opened), version
                finally:
                    self._loads -= 1
                    self._turns.notify_all()
            yield time.monotonic() - began

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        with self._turns:
            self._turns.wait_for(lambda: not self._loads)
            if self._complete is None:
                raise LinkBroken("the policy's weights were not loaded")
            complete, version = self._complete, self._version
            self._running += 1
        try:
            return [replace(completion, version=version) for completion in complete(requests)]
        finally:
            with self._turns:
                self._running -= 1
                self._turns.notify_all()

    def fingerprint(self) -> Mapping[str, Any]:
        return {"engine": "policy", "model": self.name}

    def close(self) -> None:
        """The engines are their owners' to close."""


class PolicyServer:
    """Serves the requests of one trainer for rollouts until the trainer disconnects. A context manager.

    Args:
        record: keeps the statistics that the trainer sends; None ignores them.
        generating: opens the engine of published weights; without it, the trainer generates.
        ahead: rounds that are requested before they are trained on, at most.
        at_once: whether such rounds run beside each other: then a round that runs when new weights come continues with
            them from its next turn on. Else the next round, and its weights, wait until it has ended.

    Attributes:
        path: the socket, for the trainer's config.
        error: the exception that stopped the rollouts; the trainer then got "stop".
    """

    def __init__(
        self, roll_out: RollOut, name: str, record: Record | None = None, generating: Generate | None = None,
        ahead: int = 0, at_once: bool = False,
    ) -> None:  # fmt: skip
        self._roll_out, self._generating = roll_out, generating
        self._record = record or (lambda step, statistics: None)
        self._policy, self._rounds, self._ahead = _Policy(name), ahead + 1 if at_once else 1, ahead > 0
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
        link = Link(self._listener.accept(), "the trainer")
        with closing(link), ThreadPoolExecutor(self._rounds, thread_name_prefix="rollouts") as pool:
            for kind, number, *content in link.requests():
                if kind == "roll_out":
                    pool.submit(self._answer, link, number, self._rolled_out, link, *content)
                else:
                    self._answer(link, number, self._record, *content)
            pool.shutdown(cancel_futures=True)

    def _answer(self, link: Link, number: int, work: Callable[..., Any], *arguments: Any) -> None:
        """Send what `work` returns, or why it failed: the trainer must not wait for ever."""
        try:
            link.send("answer", number, work(*arguments))
        except LinkBroken:
            pass  # the trainer has ended, and its own error says why
        except BaseException as error:
            self.error = self.error or error  # what follows from the first is not its cause
            with suppress(LinkBroken):
                link.send("stop", f"{type(error).__name__}: {error}")

    def _rolled_out(
        self, link: Link, step: int, rows: Sequence[int], version: int, published: Published | None
    ) -> tuple[Sequence[Sample], float]:
        with self._policy.loaded(version, self._opened(link, version, published)) as seconds:
            return self._roll_out(step, rows, self._policy), seconds

    @contextmanager
    def _opened(self, link: Link, version: int, published: Published | None) -> Iterator[Complete]:
        """Have the servers, or the trainer's engine, generate from these weights; yield the function that does."""

        def complete(requests: Sequence[Request]) -> list[Completion]:
            # Without messages, and without data that only scripts may read.
            ids_alone = [replace(request, messages=(), tools=(), privileged={}) for request in requests]
            completions = link.ask("complete", ids_alone).result()
            return [
                replace(completion, prompt_ids=list(request.prompt_ids))
                for request, completion in zip(requests, completions, strict=True)
            ]

        if published is not None and self._generating is not None:
            with self._generating(version, published) as engine:
                yield engine.complete
        else:
            if self._ahead:
                link.ask("load", version).result()
            yield complete


# --- the trainer's side ----------------------------------------------------------------------------------------------


@contextmanager
def connect(path: str) -> Iterator[PolicyClient]:
    """Connect the trainer to the socket `path`. Raises OSError if no server listens there."""
    with closing(PolicyClient(Link(Client(path), "the process that rolls out"))) as client:
        yield client


class PolicyClient:
    """Requests rollouts, and generates their completions meanwhile, also while the trainer trains.

    Attributes:
        publish_seconds: in which the engine loaded the last round's weights.
    """

    def __init__(self, link: Link) -> None:
        self._link, self.publish_seconds = link, 0.0
        self._engine: Any = None
        self._rounds: dict[int, Future[Any]] = {}
        self._pool = ThreadPoolExecutor(ENGINE_THREADS, thread_name_prefix="generate")
        self._reader = threading.Thread(target=self._read, name="policy link", daemon=True)
        self._reader.start()

    def roll_out(
        self,
        step: int,
        rows: Sequence[int],
        policy: Engine | Published,
        later: Mapping[int, Sequence[int]] | None = None,
    ) -> Sequence[Sample]:
        """Return a sample per row, generated by an engine here, or by servers from the published weights.

        Args:
            later: rows of rounds to request besides, by step; one that was requested before, as `step` may have been,
                is not again.

        Raises:
            LinkBroken: the other side stopped; with the reason.
        """
        published = policy if isinstance(policy, Published) else None
        self._engine = None if published else policy
        for first, of_round in {step: rows, **(later or {})}.items():
            if first not in self._rounds:
                self._rounds[first] = self._link.ask("roll_out", first, list(of_round), step, published)
        answer = self._rounds.pop(step)
        samples, self.publish_seconds = _answer_of(answer, f"the rollouts of step {step} stopped")
        return samples

    def record(self, step: int, statistics: bytes) -> None:
        """Send a round's statistics; return once they are kept, so that no checkpoint is without them.

        Raises LinkBroken with the reason if the other side cannot keep them.
        """
        _answer_of(self._link.ask("trained", step, statistics), f"the statistics of step {step} were not kept")

    def _read(self) -> None:
        for kind, number, content in self._link.requests():
            self._pool.submit(self._answer, kind, number, content)

    def _answer(self, kind: str, number: int, content: Any) -> None:
        try:
            if kind == "load":
                result = self._engine.load(content)
            else:
                result = [replace(completion, prompt_ids=None) for completion in self._engine.complete(content)]
            self._link.send("answer", number, result)
        except Exception as error:  # the call that waits must not hang
            with suppress(LinkBroken):
                self._link.send("failed", number, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._link.end()
        self._reader.join()
        self._link.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _answer_of(request: Future[Any], problem: str) -> Any:
    try:
        return request.result()
    except LinkBroken as error:
        raise LinkBroken(f"{problem}: {error}") from None
