"""Measure a round of reinforcement between the process that rolls out, its trainer and a vLLM server.

    python bench/policy_link.py [ROLLOUTS] [TURNS]     the code of PYTHONPATH, or of this checkout

The default is the round of the largest shipped recipe: 64 rollouts of 40 turns, each of 150 ids after 150 ids that it
reads. A program that answers with the ids that it was started with stands in for vLLM, in a process whose time is not
counted; nothing runs in sandboxes, and no model computes. So the figures are those of requests, answers and messages,
of both of our sides. Code that hands weights to servers asks them directly; code from before (`git worktree add`, and
PYTHONPATH) asks through the trainer.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

PROMPT, OUTPUT, READ = 4000, 150, 150
DRAW = random.Random(0)
IDS = [DRAW.randrange(1000) for _ in range(OUTPUT)]
LOGPROBS = [-DRAW.random() for _ in range(OUTPUT)]


class StandIn(BaseHTTPRequestHandler):
    """A vLLM server whose every turn is the same."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "policy", "root": "/policy", "parent": None}]})

    def do_POST(self) -> None:
        from etpi_resources.chat.format import load_chat_format

        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            return self.reply({"tokens": load_chat_format("tiny").encode(body["prompt"])})
        turn = {"token_ids": IDS, "finish_reason": "stop", "logprobs": {"token_logprobs": LOGPROBS}}
        self.reply({"model": "policy", "choices": [turn | {"prompt_token_ids": body["prompt"]}]})

    def reply(self, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def serve() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def measure(port: int, rollouts: int, turns: int) -> str:
    """Run one round; return its figures."""
    from etpi_resources.chat.format import load_chat_format
    from etpi_resources.engines import Request, Sampler
    from etpi_resources.engines.endpoints import Endpoints
    from etpi_resources.engines.vllm import VllmEngine
    from etpi_resources.trainers import policy_link
    from etpi_resources.trainers.policy_link import PolicyServer, Sample, connect

    def roll_out(step: int, rows: Any, engine: Any) -> list[Any]:
        def one(row: int) -> Any:
            ids, mask, logprobs = list(range(PROMPT)), [], []
            for turn in range(turns):
                request = Request(f"{row}/{turn}", str(row), ids, (), Sampler(1.0, 1.0, OUTPUT))
                (answer,) = engine.complete([request])
                ids = [*ids, *answer.output_ids, *range(READ)]
                mask += [1] * OUTPUT + [0] * READ
                logprobs += [*answer.logprobs, *[0.0] * READ]
            return Sample(ids[:PROMPT], ids[PROMPT:], mask, logprobs, 0.0, 0.0)

        with ThreadPoolExecutor(rollouts) as pool:
            return list(pool.map(one, rows))

    chat = load_chat_format("tiny")
    engine = VllmEngine(Endpoints([f"http://127.0.0.1:{port}"]), "policy", chat)
    direct = "generating" in inspect.signature(PolicyServer.__init__).parameters
    options: dict[str, Any] = {"generating": lambda step, published: nullcontext(engine)} if direct else {}
    policy = policy_link.Published("", False, []) if direct else engine
    with PolicyServer(roll_out, "policy", **options) as server, connect(str(server.path)) as client:
        wall, cpu = time.monotonic(), time.process_time()
        samples = client.roll_out(0, list(range(rollouts)), policy)
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    assert sum(sum(sample.mask) for sample in samples) == rollouts * turns * OUTPUT
    way = "asked directly" if direct else "asked through the trainer"
    return f"{way}: {rollouts} x {turns} turns, {wall:.1f} s, {cpu:.1f} s of CPU, load {os.getloadavg()[0]:.0f}"


def main() -> None:
    rollouts, turns = (int(text) for text in (sys.argv[1:3] if len(sys.argv) > 2 else ("64", "40")))
    with subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            print(measure(int(server.stdout.readline()), rollouts, turns))
        finally:
            server.kill()


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
