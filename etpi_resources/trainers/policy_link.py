"""A policy that is being trained, spoken to from another process.

Belongs here: the conversation between a trainer, which holds the weights and generates, and whoever rolls out, who
holds tasks, sandboxes and rewards; both sides of it, with the standard library alone. Does not belong here: training,
the agent loop, or what is generated with.

Lines of JSON over a Unix socket in a folder that only this user can open. The trainer opens every exchange:

    trainer  {"do": "roll_out", "step": optimiser steps done, "rows": [task row, ...]}
    caller   {"do": "complete", "id": n, "requests": [...]}      any number, several at once
    trainer  {"do": "completed", "id": n, "completions": [...]}  or {"do": "failed", "id": n, "error": text}
    caller   {"do": "rolled_out", "samples": [...]}              or {"do": "stop", "error": text}
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from etpi_resources.engines import Completion, Engine, Request, Sampler

ENGINE_THREADS = 64
"""Calls the trainer's side has under way at once; a call holds a thread while it is generated."""

POLL_SECONDS = 0.5

GAP_IN_FLOAT32, GAP_IN_HALF = 0.005, 0.1
"""Largest mean difference, in nats, between the log-probability a token was drawn with and the trainer's, that rounding
explains where both compute in float32, or either in 16 bits."""


def largest_gap(*dtypes: str) -> float:
    """The bound of that difference where these are computed with, by any library's name of them."""
    return GAP_IN_FLOAT32 if set(dtypes) <= {"fp32", "float32", "float"} else GAP_IN_HALF


class LinkBroken(ConnectionError):
    """The other side is gone, or said why it stops."""


class Lines:
    """A socket as lines of JSON; several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._reader = connection, connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises LinkBroken where the other side is gone; ValueError for a figure that is not finite."""
        line = json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            with self._sending:
                self._connection.sendall(line)
        except OSError as error:
            raise LinkBroken(f"the other side of the policy link is gone: {error}") from error

    def receive(self) -> dict[str, Any] | None:
        """The next message; None where the other side has closed."""
        try:
            line = self._reader.readline()
        except OSError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Also wakes whoever waits in `receive`."""
        with self._sending:
            with suppress(OSError):  # the other side was first
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()


# --- whoever rolls out ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What the trainer learns from one rollout.

    Attributes:
        prompt_ids: the first prompt. completion_ids: everything after it, observations included.
        mask: 1 where the policy wrote the id, 0 where it read it. logprobs: of each id under the sampling distribution,
            0.0 where it read it. All three (n,).
        reward: the sum of the weighted rewards. advantage: group-relative.
        parsed, solved, called: shares to log, 0 or 1 (called: whether a tool was).
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


RollOut = Callable[[int, Sequence[int], Engine], Sequence[Sample]]
"""(optimiser steps done, rows of tasks, the policy) -> a sample a row, in order."""


class PolicyServer:
    """Rolls out whatever one trainer asks for, until that trainer leaves. Use as a context manager.

    Attributes:
        path: the socket, for the trainer's configuration.
        error: what rolling out raised; the trainer was told to stop.
    """

    def __init__(self, roll_out: RollOut, name: str) -> None:
        self._roll_out, self._name = roll_out, name
        self._folder = Path(tempfile.mkdtemp(prefix="etpi-policy-"))
        self.path = self._folder / "link"
        self.error: BaseException | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(1)
        self._listener.settimeout(POLL_SECONDS)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"policy link of {name}", daemon=True)

    def __enter__(self) -> PolicyServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            lines = Lines(connection)
            policy = _Policy(lines, self._name)
            try:
                self._converse(lines, policy)
            finally:
                policy.close()
                lines.close()
            return

    def _converse(self, lines: Lines, policy: _Policy) -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="rollouts") as pool:
            while (message := lines.receive()) is not None:
                if message["do"] == "roll_out":
                    pool.submit(self._answer, lines, policy, message)
                else:
                    policy.take(message)
            policy.close()  # rollouts under way hear that there is no policy any more

    def _answer(self, lines: Lines, policy: _Policy, message: Mapping[str, Any]) -> None:
        try:
            samples = self._roll_out(message["step"], message["rows"], policy)
            lines.send({"do": "rolled_out", "samples": [asdict(sample) for sample in samples]})
        except LinkBroken:
            pass  # the trainer has gone, and says why itself
        except BaseException as error:  # the trainer must not wait for ever
            self.error = error
            with suppress(LinkBroken):
                lines.send({"do": "stop", "error": f"{type(error).__name__}: {error}"})


class _Policy:
    """The trainer's policy as an Engine."""

    def __init__(self, lines: Lines, name: str) -> None:
        self.name, self._lines = name, lines
        self._waiting: dict[int, Future[list[dict[str, Any]]]] = {}
        self._lock, self._next, self._gone = threading.Lock(), 0, False

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request. Raises LinkBroken where the trainer is gone, RuntimeError where that failed."""
        answer: Future[list[dict[str, Any]]] = Future()
        with self._lock:
            if self._gone:
                raise LinkBroken("the trainer is gone")
            number, self._next = self._next, self._next + 1
            self._waiting[number] = answer
        self._lines.send({"do": "complete", "id": number, "requests": [_request_line(r) for r in requests]})
        return [
            Completion(prompt_ids=list(request.prompt_ids), **found)
            for request, found in zip(requests, answer.result(), strict=True)
        ]

    def fingerprint(self) -> Mapping[str, Any]:
        return {"engine": "policy", "model": self.name}

    def take(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            answer = self._waiting.pop(message["id"])
        if message["do"] == "completed":
            answer.set_result(message["completions"])
        else:
            answer.set_exception(RuntimeError(message["error"]))

    def close(self) -> None:
        with self._lock:
            self._gone, waiting = True, list(self._waiting.values())
            self._waiting.clear()
        for answer in waiting:
            answer.set_exception(LinkBroken("the trainer is gone"))


def _request_line(request: Request) -> dict[str, Any]:
    if request.grammar is not None:
        raise ValueError(f"{request.request_id}: a policy that is trained is not bound by a grammar")
    return {
        "request_id": request.request_id,
        "session": request.session,
        "prompt_ids": list(request.prompt_ids),
        "sampler": asdict(request.sampler),
    }


# --- the trainer ---------------------------------------------------------------------------------------------------


@contextmanager
def connect(path: str) -> Iterator[PolicyClient]:
    """The trainer's side of the link whose socket is at `path`. Raises OSError where nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    client = PolicyClient(Lines(connection))
    try:
        yield client
    finally:
        client.close()


class PolicyClient:
    """Asks for rollouts, and generates for them meanwhile."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._pool = ThreadPoolExecutor(ENGINE_THREADS, thread_name_prefix="generate")

    def roll_out(self, step: int, rows: Sequence[int], engine: Engine) -> list[Sample]:
        """A sample a row, generated by `engine`. Raises LinkBroken where the other side stops, with its reason."""
        self._lines.send({"do": "roll_out", "step": step, "rows": list(rows)})
        while (message := self._lines.receive()) is not None:
            if message["do"] == "complete":
                self._pool.submit(self._complete, message, engine)
            elif message["do"] == "rolled_out":
                return [Sample(**sample) for sample in message["samples"]]
            else:
                raise LinkBroken(f"rolling out stopped at step {step}: {message['error']}")
        raise LinkBroken(f"whoever rolls out is gone at step {step}")

    def _complete(self, message: Mapping[str, Any], engine: Engine) -> None:
        try:
            requests = [
                Request(r["request_id"], r["session"], r["prompt_ids"], (), Sampler(**r["sampler"]))
                for r in message["requests"]
            ]
            found = [
                {
                    "output_ids": list(c.output_ids or ()),
                    "logprobs": list(c.logprobs or ()),
                    "text": c.text,
                    "finish_reason": c.finish_reason,
                    "model": c.model,
                }
                for c in engine.complete(requests)
            ]
            self._lines.send({"do": "completed", "id": message["id"], "completions": found})
        except Exception as error:  # whoever waits must hear of it
            self._lines.send({"do": "failed", "id": message["id"], "error": f"{type(error).__name__}: {error}"})

    def close(self) -> None:
        self._lines.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
