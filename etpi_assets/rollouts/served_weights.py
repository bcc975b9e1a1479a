"""Detect that a server has other weights than before, under the same name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel

from etpi_assets.rollouts.journal import Journal
from etpi_resources.chat.format import ChatFormat
from etpi_resources.engines import Engine, EngineUnavailable
from etpi_resources.lake.files import write_atomically

if TYPE_CHECKING:
    from etpi_resources.engines.vllm import VllmEngine

INTERVAL_SECONDS = 60.0
RETRY_SECONDS = 0.5
PATIENCE_SECONDS = 30.0
"""So long the first and the last comparison wait for a server that answered before: it may be starting with other
weights."""
TOLERANCE = 0.02
"""Mean absolute difference of log-probabilities, in nats. The same weights in bfloat16 differ by less from batch to
batch."""

_QUESTION = (
    "The test of parse_date fails for years before 1000. Find the cause and fix it; run the tests before you stop."
)
_ANSWER = "I read the failing test first, then the function that it calls.\ngrep -rn parse_date src tests | head -20\n"

Log = Callable[[str], None]


@contextmanager
def same_weights(engine: Engine, chat: ChatFormat, journal: Journal, log: Log) -> Iterator[Callable[[], None]]:
    """Require that an engine's servers keep the weights that the journal's first rollouts came from.

    The servers are compared on entry, on exit, and when the callable that the context manager returns is called and
    the last comparison is INTERVAL_SECONDS ago. Only vLLM's servers can be compared.

    Raises:
        EngineUnavailable: a server has other weights. The rollouts since the last comparison are set aside, because
            they may have come from either.
    """
    from etpi_resources.engines.vllm import VllmEngine

    if not isinstance(engine, VllmEngine):
        yield lambda: None
        return
    weights = _ServedWeights(engine, chat, journal, log)
    weights.compare(PATIENCE_SECONDS)
    try:
        yield weights.compare_if_due
    finally:
        weights.compare(PATIENCE_SECONDS)


class _Fingerprint(BaseModel):
    """The log-probabilities that the first rollouts' server gave a fixed text, stored beside the journal.

    Attributes:
        ids: the text.
        logprobs: of each id but the first, in nats.
        trusted: the bytes of the journal that come from these weights.
    """

    ids: list[int]
    logprobs: list[float]
    trusted: int


class _ServedWeights:
    """Compares the servers of an engine with the fingerprint of the journal. Thread-safe."""

    def __init__(self, engine: VllmEngine, chat: ChatFormat, journal: Journal, log: Log) -> None:
        self._engine, self._journal, self._log = engine, journal, log
        self._ids = [*chat.prompt_ids([{"role": "user", "content": _QUESTION}]), *chat.encode(_ANSWER)]
        self._path = journal.path.with_suffix(".weights.json")
        self._first: _Fingerprint | None = None
        with suppress(FileNotFoundError, ValueError):
            stored = _Fingerprint.model_validate_json(self._path.read_text())
            self._first = stored if stored.ids == self._ids else None
        self._next, self._moved, self._impossible = 0.0, 0, False
        self._lock = threading.Lock()

    def compare_if_due(self) -> None:
        """Call `compare` unless another thread does, or did so within INTERVAL_SECONDS."""
        if time.monotonic() >= self._next and self._lock.acquire(blocking=False):
            try:
                self._compare()
            finally:
                self._lock.release()

    def compare(self, patience: float) -> None:
        """Compare every server that answers, within the time limit if any of its answers may be in a rollout.

        Raises:
            EngineUnavailable: a server has other weights.
        """
        with self._lock:
            self._compare(patience)

    def _compare(self, patience: float = 0.0) -> None:
        if self._impossible:
            return
        size, deadline = self._journal.size, time.monotonic() + patience
        try:
            by_server = self._engine.prompt_logprobs_by_server(self._ids)
            while set(self._engine.answered_urls) - by_server.keys() and time.monotonic() < deadline:
                time.sleep(RETRY_SECONDS)
                by_server |= self._engine.prompt_logprobs_by_server(self._ids)
        except RuntimeError as error:
            self._impossible = True
            self._log(f"not applicable: whether the servers of {self._engine.name} keep their weights: {error}")
            return
        if silent := set(self._engine.answered_urls) - by_server.keys():
            self._log(f"{', '.join(sorted(silent))} cannot be compared with the first rollouts' weights: no answer")
        for url, logprobs in by_server.items():
            self._first = self._first or _Fingerprint(ids=self._ids, logprobs=logprobs, trusted=size)
            difference = float(np.abs(np.subtract(self._first.logprobs, logprobs)).mean())
            if difference > TOLERANCE:
                self._refuse(url, difference, self._first)
        if self._first and len(by_server) == len(self._engine.urls):
            self._first.trusted = size
            write_atomically(self._path, self._first.model_dump_json())
        self._next = time.monotonic() + INTERVAL_SECONDS

    def _refuse(self, url: str, difference: float, first: _Fingerprint) -> None:
        number, aside = self._journal.set_aside(first.trusted)
        self._moved += number
        raise EngineUnavailable(
            f"{url} serves other weights as {self._engine.name!r} than when this set's first rollouts were collected: "
            f"the log-probabilities of a fixed text differ by {difference:.3f} nats on average. The {self._moved} "
            f"rollouts since the last comparison were moved to {aside} and will run again. Serve the first weights "
            "again, or serve the new ones under a name of their own (engine.model). To collect the whole set from the "
            f"new weights, remove {self._path.parent}"
        )
