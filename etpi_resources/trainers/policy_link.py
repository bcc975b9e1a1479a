"""Connects a trainer, which generates from the policy's weights, with the process that rolls the policy out.

Both sides are here, with the standard library alone: the trainer's (`connect`, PolicyClient), and that of the process
with tasks, sandboxes and rewards (PolicyServer). They exchange lines of JSON over a Unix socket in a folder that only
this user can open. The trainer starts every exchange:

    trainer  {"do": "roll_out", "step": optimiser steps done, "rows": [task row, ...], "published": Published or null}
    server   {"do": "complete", "id": n, "requests": [...]}      if null: any number, several at the same time
    trainer  {"do": "completed", "id": n, "completions": [...]}  or {"do": "failed", "id": n, "error": text}
    server   {"do": "rolled_out", "samples": [...], "publish_seconds": x}  or {"do": "stop", "error": text}

and, when the round was trained on for the first time,

    trainer  {"do": "trained", "step": as above, "logprobs": base64, "entropies": base64}
    server   {"do": "recorded"}                                  or {"do": "stop", "error": text}
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from etpi_resources.engines import Completion, Engine, Request, Sampler

ENGINE_THREADS = 64
"""Calls that the trainer's side runs at the same time; each takes a thread while it is generated."""

POLL_SECONDS = 0.5

GAP_IN_FLOAT32, GAP_IN_HALF = 0.005, 0.2
"""Largest mean difference, in nats, that rounding explains between the log-prob a token was sampled with and the
trainer's: if both compute in float32, or if either computes in 16 bits. In 16 bits random models of 0.6B to 8B shapes
differ by up to 0.15, and by 0.28 if the temperature is 0.7 in place of 1 (bench/check_bounds.py)."""


def largest_gap(*dtypes: str) -> float:
    """Return the bound of that difference for computations in these dtypes, by any library's names."""
    return GAP_IN_FLOAT32 if set(dtypes) <= {"fp32", "float32", "float"} else GAP_IN_HALF


class LinkBroken(ConnectionError):
    """The other side closed the link, or stopped with a reason."""


class JsonLines:
    """Lines of JSON over a socket; several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._reader = connection, connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises LinkBroken if the other side has closed; ValueError for a number that is not finite."""
        line = json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            with self._sending:
                self._connection.sendall(line)
        except OSError as error:
            raise LinkBroken(f"the other side closed the policy link: {error}") from error

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None if the other side has closed."""
        try:
            line = self._reader.readline()
        except OSError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Close the socket; a thread that waits in `receive` gets None."""
        with self._sending:
            with suppress(OSError):  # the other side may have closed first
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()


# --- the side that rolls out -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One rollout as the trainer sees it.

    Attributes:
        prompt_ids: the first prompt. completion_ids: all ids after it, observations included.
        mask: 1 for ids that the policy generated, 0 for observations. logprobs: of each id under the sampling
            distribution, 0.0 for observations. All three (n,).
        reward: the sum of the weighted rewards. advantage: group-relative.
        parsed, solved, called: 0 or 1, to be logged as shares (called: whether the policy called a tool).
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


@dataclass(frozen=True)
class TokenStatistics:
    """Figures that the trainer computed at each generated id of a round, before the first update on the round.

    Attributes:
        logprobs: of the id; entropies: of the distribution at the id, at the sampling temperature. Both in nats,
            little-endian float32, as bytes: the round's samples one after the other, and of each the ids whose mask
            is 1; NaN for a sample that is not in the loss.
    """

    logprobs: bytes
    entropies: bytes


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
            lines = JsonLines(connection)
            policy = _RemotePolicy(lines, self._name)
            try:
                self._dispatch(lines, policy)
            finally:
                policy.close()
                lines.close()
            return

    def _dispatch(self, lines: JsonLines, policy: _RemotePolicy) -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="rollouts") as pool:
            while (message := lines.receive()) is not None:
                if message["do"] == "roll_out":
                    pool.submit(self._run_round, lines, policy, message)
                elif message["do"] == "trained":
                    self._keep(lines, message)
                else:
                    policy.receive(message)
            policy.close()  # running rollouts then fail instead of waiting for the trainer

    def _run_round(self, lines: JsonLines, policy: _RemotePolicy, message: Mapping[str, Any]) -> None:
        try:
            began = time.monotonic()
            with self._engine(message, policy) as engine:
                publish_seconds = time.monotonic() - began
                samples = self._roll_out(message["step"], message["rows"], engine)
            values = [asdict(sample) for sample in samples]
            lines.send({"do": "rolled_out", "samples": values, "publish_seconds": publish_seconds})
        except LinkBroken:
            pass  # the trainer has ended, and its own error says why
        except BaseException as error:  # whatever it is, the trainer must not wait for ever
            self._stop(lines, error)

    def _engine(self, message: Mapping[str, Any], policy: _RemotePolicy) -> AbstractContextManager[Engine]:
        if self._generating is None:
            return nullcontext(policy)
        return self._generating(message["step"], Published(**message["published"]))

    def _keep(self, lines: JsonLines, message: Mapping[str, Any]) -> None:
        try:
            if self._record is not None:
                values = (base64.b64decode(message[name]) for name in ("logprobs", "entropies"))
                self._record(message["step"], TokenStatistics(*values))
            lines.send({"do": "recorded"})
        except LinkBroken:
            pass
        except BaseException as error:
            self._stop(lines, error)

    def _stop(self, lines: JsonLines, error: BaseException) -> None:
        self.error = error
        with suppress(LinkBroken):
            lines.send({"do": "stop", "error": f"{type(error).__name__}: {error}"})


class _RemotePolicy:
    """The trainer's policy as an Engine."""

    def __init__(self, lines: JsonLines, name: str) -> None:
        self.name, self._lines = name, lines
        self._waiting: dict[int, Future[list[dict[str, Any]]]] = {}
        self._lock, self._next, self._closed = threading.Lock(), 0, False

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return a completion per request. Raises LinkBroken if the trainer is gone, or RuntimeError."""
        answer: Future[list[dict[str, Any]]] = Future()
        with self._lock:
            if self._closed:
                raise LinkBroken("the trainer is gone")
            number, self._next = self._next, self._next + 1
            self._waiting[number] = answer
        self._lines.send({"do": "complete", "id": number, "requests": [_request_line(r) for r in requests]})
        return [
            Completion(prompt_ids=list(request.prompt_ids), **completion)
            for request, completion in zip(requests, answer.result(), strict=True)
        ]

    def fingerprint(self) -> Mapping[str, Any]:
        return {"engine": "policy", "model": self.name}

    def receive(self, message: Mapping[str, Any]) -> None:
        """Pass an answer of the trainer to the call that waits for it."""
        with self._lock:
            answer = self._waiting.pop(message["id"])
        if message["do"] == "completed":
            answer.set_result(message["completions"])
        else:
            answer.set_exception(RuntimeError(message["error"]))

    def close(self) -> None:
        with self._lock:
            self._closed, waiting = True, list(self._waiting.values())
            self._waiting.clear()
        for answer in waiting:
            answer.set_exception(LinkBroken("the trainer is gone"))


def _request_line(request: Request) -> dict[str, Any]:
    if request.grammar is not None:
        raise ValueError(f"{request.request_id}: a policy in training does not support grammars")
    return {
        "request_id": request.request_id,
        "session": request.session,
        "prompt_ids": list(request.prompt_ids),
        "sampler": asdict(request.sampler),
    }


# --- the trainer's side ----------------------------------------------------------------------------------------------


@contextmanager
def connect(path: str) -> Iterator[PolicyClient]:
    """Connect the trainer to the socket `path`. Raises OSError if no server listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    client = PolicyClient(JsonLines(connection))
    try:
        yield client
    finally:
        client.close()


class PolicyClient:
    """Requests rollouts, and generates their completions meanwhile.

    Attributes:
        publish_seconds: in which the servers loaded the last round's weights.
    """

    def __init__(self, lines: JsonLines) -> None:
        self._lines, self.publish_seconds = lines, 0.0
        self._pool = ThreadPoolExecutor(ENGINE_THREADS, thread_name_prefix="generate")

    def roll_out(self, step: int, rows: Sequence[int], policy: Engine | Published) -> list[Sample]:
        """Return a sample per row, generated by an engine here, or by servers from the published weights.

        Raises:
            LinkBroken: the other side stopped; with the reason.
        """
        published = asdict(policy) if isinstance(policy, Published) else None
        self._lines.send({"do": "roll_out", "step": step, "rows": list(rows), "published": published})
        while (message := self._lines.receive()) is not None:
            if message["do"] == "complete" and not isinstance(policy, Published):
                self._pool.submit(self._complete, message, policy)
            elif message["do"] == "rolled_out":
                self.publish_seconds = message["publish_seconds"]
                return [Sample(**sample) for sample in message["samples"]]
            else:
                raise LinkBroken(f"the rollouts stopped at step {step}: {message['error']}")
        raise LinkBroken(f"the process that rolls out is gone at step {step}")

    def record(self, step: int, statistics: TokenStatistics) -> None:
        """Send a round's statistics; return once they are kept, so that no checkpoint is without them.

        Raises LinkBroken with the reason if the other side cannot keep them.
        """
        values = {name: base64.b64encode(value).decode() for name, value in vars(statistics).items()}
        self._lines.send({"do": "trained", "step": step, **values})
        reply = self._lines.receive()
        if reply is None:
            raise LinkBroken(f"the process that rolls out is gone at step {step}")
        if reply["do"] != "recorded":
            raise LinkBroken(f"the statistics of step {step} were not kept: {reply.get('error')}")

    def _complete(self, message: Mapping[str, Any], engine: Engine) -> None:
        try:
            requests = [
                Request(r["request_id"], r["session"], r["prompt_ids"], (), Sampler(**r["sampler"]))
                for r in message["requests"]
            ]
            completions = [
                {
                    "output_ids": list(c.output_ids or ()),
                    "logprobs": list(c.logprobs or ()),
                    "text": c.text,
                    "finish_reason": c.finish_reason,
                    "model": c.model,
                }
                for c in engine.complete(requests)
            ]
            self._lines.send({"do": "completed", "id": message["id"], "completions": completions})
        except Exception as error:  # the call that waits must not hang
            self._lines.send({"do": "failed", "id": message["id"], "error": f"{type(error).__name__}: {error}"})

    def close(self) -> None:
        self._lines.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
