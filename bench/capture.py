"""Measure what the capturing proxy adds to a call: 64 scripted clients through `etpi capture`, and without it.

    python bench/capture.py [--clients 64] [--turns 8] [--words 6000] [--delay 0.5] [--rounds 3]

The upstream is a stand-in for vLLM: it answers every request with the same call of a tool, `--delay` seconds after it
came. In each round the clients send the same growing conversations to the upstream and to the proxy in front of it, so
both are measured in the same minute. Printed are wall time per call, CPU of the proxy and of the upstream per call, the
proxy's resident memory, and the size of its logs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from machine import machine

from etpi_resources.capture.store import read_log
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.tool_forms import Call

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.loopback import Loopback

NAME = "teacher"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "run", "parameters": SCHEMA}}]
RESULT = "a line of the result of a command\n" * 30


class Upstream(Loopback):
    """A server that renders nothing: prompts of ids are repeated, those of messages are none."""

    def prompt_of(self, body: dict[str, Any]) -> list[int]:
        return body.get("prompt", [0])


def serve(delay: float) -> None:
    chat = load_chat_format("qwen3")
    form = chat.tool_form
    assert form
    call = form.render([Call("bash", {"command": "ls -la src"})])
    ThreadingHTTPServer.request_queue_size = 256  # all clients connect at once
    with Upstream(NAME, chat) as upstream:
        upstream.say = lambda body: f"I look.\n{call}"
        upstream.message = lambda body, text: {"content": text}
        upstream.delay, upstream.remembered = delay, 1
        print(upstream.url, flush=True)
        signal.pause()


def converse(base: str, headers: dict[str, str], number: int, turns: int, words: int) -> list[float]:
    """Return the seconds of each call of one client."""
    address, seconds = urlsplit(base), []
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "read what is there " * (words // 4)},
        {"role": "user", "content": f"Fix the sum, client {number}."},
    ]
    connection = http.client.HTTPConnection(address.netloc, timeout=600)
    for _ in range(turns):
        body = json.dumps({"model": NAME, "messages": messages, "tools": TOOLS})
        started = time.perf_counter()
        connection.request("POST", f"{address.path}/chat/completions", body, headers)
        answer = connection.getresponse()
        read = answer.read()
        seconds.append(time.perf_counter() - started)
        assert answer.status == 200, read[:500]
        messages += [json.loads(read)["choices"][0]["message"], {"role": "user", "content": RESULT}]
    connection.close()
    return seconds


def measure(bases: list[str], headers: dict[str, str], options: argparse.Namespace, watched: dict[str, psutil.Process]):
    """Return the median and 95th percentile of a call in ms, and CPU ms a call of each watched process."""
    before = {name: sum(process.cpu_times()[:2]) for name, process in watched.items()}
    with ThreadPoolExecutor(options.clients) as pool:
        jobs = [pool.submit(converse, base, headers, at, options.turns, options.words) for at, base in enumerate(bases)]
        seconds = [second for job in jobs for second in job.result()]
    used = {
        name: 1000 * (sum(process.cpu_times()[:2]) - before[name]) / len(seconds) for name, process in watched.items()
    }
    return 1000 * statistics.median(seconds), 1000 * statistics.quantiles(seconds, n=20)[-1], used


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--words", type=int, default=6000)
    parser.add_argument("--delay", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.delay)
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        serving = [sys.executable, __file__, "--serve", "--delay", str(options.delay)]
        upstream = subprocess.Popen(serving, stdout=subprocess.PIPE, text=True)
        assert upstream.stdout
        url = upstream.stdout.readline().strip()
        command = ["-m", "etpi", "capture", "--url", url, "--model", NAME, "--tokenizer", "qwen3"]
        proxy = subprocess.Popen(
            [sys.executable, *command, "--to", folder, "--port", "0"], stderr=subprocess.PIPE, text=True
        )
        assert proxy.stderr
        at = proxy.stderr.readline().partition("base URL ")[2].partition("/a/")[0]
        threading.Thread(target=proxy.stderr.read, daemon=True).start()
        headers = {"authorization": f"Bearer {(Path(folder) / 'key').read_text()}", "content-type": "application/json"}
        watched = {"proxy": psutil.Process(proxy.pid), "upstream": psutil.Process(upstream.pid)}
        try:
            converse(f"{at}/a/first/v1", headers, 0, 1, options.words)
            resident = watched["proxy"].memory_info().rss
            for number in range(options.rounds):
                direct = measure([f"{url}/v1"] * options.clients, {}, options, watched)
                names = [f"{at}/a/round{number}-{client}/v1" for client in range(options.clients)]
                through = measure(names, headers, options, watched)
                load = os.getloadavg()[0]
                print(
                    f"round {number}: direct {direct[0]:.0f} ms (p95 {direct[1]:.0f}), through the proxy "
                    f"{through[0]:.0f} ms (p95 {through[1]:.0f}): +{through[0] - direct[0]:.0f} ms, "
                    f"{through[0] / direct[0]:.2f} times; CPU ms a call: proxy {through[2]['proxy']:.1f}, upstream "
                    f"{through[2]['upstream']:.1f} (direct {direct[2]['upstream']:.1f}); proxy "
                    f"{resident / 2**20:.0f} -> {watched['proxy'].memory_info().rss / 2**20:.0f} MiB; load {load:.0f}"
                )
            logs = sorted(Path(folder).glob("*.jsonl"))
            prompt = max(len(row["prompt_ids"]) for row in read_log(logs[-1]) if "output_ids" in row)
            size = sum(log.stat().st_size for log in logs) / len(logs)
            print(f"{len(logs)} logs of {size / 2**10:.0f} KiB; longest prompt {prompt} ids")
        finally:
            for process in (proxy, upstream):
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
