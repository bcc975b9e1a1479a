"""Ray nodes on this machine: raylets with loopback addresses of their own, which end with the test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from etpi_resources.process.supervise import supervised

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def ray_nodes(resources: Sequence[Mapping[str, float]], environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start a raylet per entry of `resources`, on 127.0.0.2, 127.0.0.3, ...; yield the address of the head."""
    port = free_port()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="r", dir="/tmp"))
        raylets = [
            stack.enter_context(_raylet(number, f"127.0.0.2:{port}", offered, folder, environment or {}))
            for number, offered in enumerate(resources)
        ]
        for started in raylets:
            started()
        yield f"127.0.0.2:{port}"


@contextmanager
def _raylet(
    number: int, head: str, offered: Mapping[str, float], folder: str, environment: Mapping[str, str]
) -> Iterator[Callable[[], None]]:
    """Start a raylet; yield a function that waits until it runs."""
    first = ["--head", f"--port={head.partition(':')[2]}", "--include-dashboard=false", f"--temp-dir={folder}"]
    options = [f"--address={head}"] if number else first
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address=127.0.0.{number + 2}",
        "--num-cpus=1", "--num-gpus=0", f"--resources={json.dumps(dict(offered))}",
        "--object-store-memory=100000000", "--disable-usage-stats", *options,
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    log = Path(folder) / f"raylet-{number}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            supervised(command, grace=2.0),
            env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", **environment},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait() -> None:
        while "Ray runtime started" not in log.read_text():
            if process.poll() is not None:
                raise RuntimeError(f"ray start ended: {log.read_text()}")
            time.sleep(0.05)

    try:
        yield wait
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        process.wait()
