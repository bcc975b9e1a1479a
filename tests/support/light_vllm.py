"""A program with the arguments of `vllm serve` that lists a model and computes nothing, for tests of servers' lives.

It runs a child process, as vLLM does, refuses requests without VLLM_API_KEY if that is set, and needs no packages. A
file `broken` in the model's folder makes it end at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY = os.environ.get("VLLM_API_KEY")


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = not KEY or self.headers.get("authorization") == f"Bearer {KEY}" or self.path == "/health"
        body = json.dumps({"data": [{"id": options.served_model_name, "root": options.folder}]}).encode()
        self.send_response(200 if known else 401)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


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
    ThreadingHTTPServer((options.host, options.port), _Handler).serve_forever()
