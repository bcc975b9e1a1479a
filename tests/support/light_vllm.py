"""A program with the arguments of `vllm serve` that lists a model and computes nothing, for tests of servers' lives.

It runs a child process, as vLLM does, refuses requests without VLLM_API_KEY if that is set, and needs no packages. A
file `broken` in the model's folder makes it end at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.web_server import Handler, WebServer

KEY = os.environ.get("VLLM_API_KEY")


def respond(handler: Handler) -> None:
    known = not KEY or handler.headers.get("authorization") == f"Bearer {KEY}" or handler.path == "/health"
    handler.reply(200 if known else 401, {"data": [{"id": options.served_model_name, "root": options.folder}]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("folder")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    options, more = parser.parse_known_args()
    print(f"light vllm {options.host}:{options.port} {' '.join(more)}", flush=True)
    if (Path(options.folder) / "broken").exists():
        sys.exit("ValueError: this checkpoint is broken")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", f"engine-of-{options.port}"])
    with WebServer(respond, options.port, options.host):
        signal.pause()
