"""A vLLM server whose answers are a function of the prompt, with faults at random, as a program.

    python -m tests.support.faulty_server --port N [--weights 0] [--rate 0.05] [--seed 0]

`--rate` is the share of generation requests with a fault; beside these, every STORM_EVERY seconds all requests get 429
for STORM_SECONDS. Servers with other `--weights` give other log-probabilities. The program prints "ready".
"""

from __future__ import annotations

import argparse
import hashlib
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT
from etpi_resources.chat.format import ChatFormat
from tests.support.loopback import Fault, Loopback, drop, status

NAME = "teacher"
TURNS = 5
"""An agent submits after so many turns."""
STORM_EVERY, STORM_SECONDS = 20.0, 2.0
LATENCY_SECONDS = 2.0


def reply(chat: ChatFormat, prompt: Sequence[int]) -> str:
    """Return the only right text for a prompt: a command that prints a digest of it, at the end a submission."""
    digest = hashlib.sha256(repr(list(prompt)).encode()).hexdigest()[:8]
    command = f"echo {SUBMIT}" if list(prompt).count(chat.turn_id) > 2 * TURNS + 2 else f"echo {digest}; ls"
    return f"I look at {digest}.\n{format_action(command)}"


def cut(handler: Any) -> None:
    """Promise more bytes than are sent, then close the connection."""
    handler.send_response(200)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", "5000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"token_ids": [1, 2')
    handler.wfile.flush()
    drop(handler)


TRANSPORT: dict[str, Fault] = {
    "cut stream": cut, "closed connection": drop, "500": status(500), "503": status(503),
    "null": lambda handler: handler.reply(200, None), "no choice": lambda handler: handler.reply(200, {"choices": []}),
}  # fmt: skip
CONTENT = ("latency", "ids of another text", "ids beyond the vocabulary", "another model")


class FaultyServer(Loopback):
    """A server with faults at random.

    Args:
        weights: log-probabilities depend on it.
        rate: the share of generation requests with a fault, in [0, 1].
        only: the fault, one of TRANSPORT and CONTENT; by default any, and storms of 429.
    """

    def __init__(self, port: int = 0, weights: int = 0, rate: float = 0.0, seed: int = 0, only: str = "") -> None:
        self._rng, self.weights, self._rate = random.Random(seed), weights, rate
        self._only, self._kinds = only, [only] if only else [*TRANSPORT, *CONTENT]
        self._start = time.monotonic()
        super().__init__(NAME, port=port)
        self.remembered = 10
        self.say = lambda body: reply(self.chat, self.prompt_of(body))

    def next_fault(self) -> Fault | None:
        if self.faults or not self._rate:
            return super().next_fault()
        if not self._only and (time.monotonic() - self._start) % STORM_EVERY > STORM_EVERY - STORM_SECONDS:
            return status(429, "slow down", **{"retry-after": "0.2"})
        kind = self._rng.choice(self._kinds) if self._rng.random() < self._rate else ""
        return TRANSPORT.get(kind, lambda handler: handler.reply(200, self._faulty(handler, kind)))

    def _faulty(self, handler: Any, kind: str) -> dict[str, Any]:
        answer = self.answer(handler.path, handler.body)
        if "prompt_logprobs" in handler.body:
            return answer
        (choice,) = answer["choices"]
        if kind == "latency":
            time.sleep(self._rng.uniform(0, LATENCY_SECONDS))
        elif kind == "ids of another text":
            choice["token_ids"] = [*self.chat.encode("rm -rf everything"), self.chat.end_id]
        elif kind == "ids beyond the vocabulary":
            choice["token_ids"] = [self.chat.vocab_size + 7, *choice["token_ids"]]
        elif kind == "another model":
            answer["model"] = "somebody-else"
        return answer

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": NAME, **(super().answer(path, body) or {})}

    def scores(self, body: dict[str, Any]) -> list[float]:
        numbers = range(len(self.prompt_of(body)) - 1)
        return [-0.5 - (hash((self.weights, at)) % 1000) / 1000 * bool(self.weights) for at in numbers]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--weights", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with FaultyServer(options.port, options.weights, options.rate, options.seed):
        print("ready", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
