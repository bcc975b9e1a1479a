"""Simulate reinforcement with `rl.ahead` on an H200 for training and one for vLLM, through the real link between both.

    python bench/rounds_ahead.py [ROUNDS] [SCALE]

No model computes: turns, sandboxes, updates and hand-overs sleep, SCALE times shorter (20 by default). A round is 64
rollouts of 4 turns, 512 tokens on average and of uneven lengths, after a prompt of 2,000. Updates and writing take the
times measured on an H200 for Qwen3-4B's shape (README.md). A step of vLLM reads all weights and the keys and values of
every running sequence at a share of an H200's bandwidth, so rounds side by side slow each other down; the share and the
time of loading weights are assumed, and several are printed.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench.machine import machine
from etpi_resources.engines import Completion, Request, Sampler
from etpi_resources.trainers.contracts import GrpoSettings
from etpi_resources.trainers.policy_link import PolicyServer, Published, Sample, connect

ROLLOUTS, TURNS, TOKENS, SANDBOX = 64, 4, 128, 0.2
WEIGHTS, SEQUENCE, BANDWIDTH = 8.0e9, 2300 * 147456, 4.8e12
"""Bytes that a step reads: weights in 16 bits, and 2,300 tokens of a sequence; bytes a second."""
CHUNK = 16
"""Tokens after which the number of running sequences is looked at again."""


@dataclass(frozen=True)
class Times:
    """Seconds of an update, of writing the weights, and of loading them into the servers."""

    update: float
    write: float
    load: float


LORA = Times(update=8 * 0.76, write=0.1, load=0.5)
FULL = Times(update=5.2, write=13.3, load=4.0)


class Servers:
    """Sleeps for the tokens of a request's turn, which its rollout and turn decide."""

    name = "policy"

    def __init__(self, share: float, load: float, scale: float) -> None:
        self.share, self.load, self.scale = share, load, scale
        self.running, self.lock = 0, Lock()

    @contextmanager
    def generating(self, step: int, published: Published) -> Iterator[Servers]:
        time.sleep(self.load / self.scale)
        yield self

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        [request] = requests
        tokens = min(4 * TOKENS, TOKENS * random.Random(request.request_id).lognormvariate(-0.18, 0.6))
        with self.lock:
            self.running += 1
        for at in range(0, round(tokens), CHUNK):
            step = (WEIGHTS + self.running * SEQUENCE) / (self.share * BANDWIDTH)
            time.sleep(min(CHUNK, tokens - at) * step / self.scale)
        with self.lock:
            self.running -= 1
        return [Completion([1], [2], [0.0], "", "stop", self.name)]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


def seconds(rounds: int, scale: float, share: float, times: Times, ahead: int, partial: str) -> tuple[float, float]:
    """Return the simulated seconds of a round, and the mean staleness of its turns."""
    rl = GrpoSettings.model_construct(steps=rounds, iterations=1, ahead=ahead, last_step=rounds)
    lags: list[int] = []

    def roll_out(step: int, rows: Sequence[int], engine: Any) -> list[Sample]:
        def one(row: int) -> None:
            for turn in range(TURNS):
                [completion] = engine.complete([Request(f"{step}/{row}/{turn}", f"{step}/{row}", [1], (), Sampler())])
                lags.append(step - completion.version)
                time.sleep(SANDBOX / scale)

        with ThreadPoolExecutor(len(rows)) as pool:
            list(pool.map(one, rows))
        return [Sample([1], [2], [1], [0.0], 0.0, 0.0)] * len(rows)

    servers, rows = Servers(share, times.load, scale), list(range(ROLLOUTS))
    with (
        PolicyServer(roll_out, "policy", None, servers.generating, ahead, partial == "continue") as server,
        connect(str(server.path)) as client,
    ):
        began = time.monotonic()
        for step in range(rounds):
            time.sleep(times.write / scale)
            client.roll_out(step, rows, Published("/", False, ()), dict.fromkeys(rl.rounds(step)[1:], rows))
            time.sleep(times.update / scale)
        spent = time.monotonic() - began
    return spent * scale / rounds, sum(lags) / len(lags)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    scale = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    print(machine(), flush=True)
    for name, times in {"LoRA": LORA, "full": FULL}.items():
        for share in (0.8, 0.5, 0.25):
            alternating, _ = seconds(rounds, scale, share, times, 0, "finish")
            print(f"{name}, {share:.0%} of the bandwidth: {alternating:.1f} s a round, rollouts and updates alternate")
            for ahead, partial in ((1, "finish"), (1, "continue"), (2, "continue")):
                spent, lag = seconds(rounds, scale, share, times, ahead, partial)
                print(
                    f"  ahead = {ahead}, {partial}: {spent:.1f} s, {alternating / spent:.2f}x; staleness {lag:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
