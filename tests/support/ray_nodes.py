"""A Ray cluster of several raylets on this machine, on loopback, for tests; and a `cluster.toml` that names it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from etpi_resources.process.supervise import descendants, supervised

START_SECONDS = 60.0
ROOT = Path(__file__).parents[2]
MEMORY = 100_000_000
NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "etpi[cluster]"')


class RayNodes:
    """A head without resources, and nodes that are added and killed. The temporary folder's path must be short.

    Attributes:
        settings: the `cluster.toml`.
        address: the head's.
    """

    def __init__(self, folder: Path, lake: Path, address: str = "127.0.0.1") -> None:
        self._folder, self._ip, self._nodes = folder, address, dict[str, subprocess.Popen[bytes]]()
        self._port = free_port(address)
        self.address = f"{address}:{self._port}"
        self.settings = folder / "cluster.toml"
        text = f'lake = "{lake}"\npostgres = "postgresql://nobody@127.0.0.1/none"\n'
        self.settings.write_text(f'{text}ray = "{self.address}"\njobs = "http://127.0.0.1:1"\n')
        self._start("head", ["--head", f"--port={self._port}", "--include-dashboard=false", "--num-cpus=0"])

    def add(
        self,
        name: str,
        *,
        slots: int = 0,
        cpus: int = 1,
        gpus: int = 0,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a node that offers so many rollouts at once."""
        resources = f'{{"etpi_sandbox": {slots}}}' if slots else "{}"
        options = [f"--address={self.address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--resources={resources}"]
        self._start(name, options, prefix, environment)

    def pids(self, name: str, command: str) -> list[int]:
        """Return the processes of a node whose command line contains a text, "raylet/raylet" or "ray::" for example."""
        return [pid for pid in descendants(self._nodes[name].pid) if command in command_line(pid)]

    def kill(self, name: str, command: str) -> None:
        for pid in self.pids(name, command):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for process in reversed(self._nodes.values()):
            process.terminate()
        for process in self._nodes.values():
            process.wait()

    def _start(
        self,
        name: str,
        options: Sequence[str],
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
        command += [f"--node-ip-address={self._ip}", f"--object-store-memory={MEMORY}", "--disable-usage-stats"]
        if "--head" in options:
            command += [f"--temp-dir={self._folder}"]
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "ETPI_"))}
        log = self._folder.parent / f"{self._folder.name}-{name}.log"
        with log.open("wb") as file:
            self._nodes[name] = subprocess.Popen(
                supervised(command, grace=3.0),
                env={**clean, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in log.read_text(errors="replace"):
            if self._nodes[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)


@contextmanager
def connected(cluster: RayNodes) -> Iterator[None]:
    """Let this process use the cluster as a step does; afterwards it is disconnected."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ETPI_CLUSTER", str(cluster.settings))
        try:
            yield
        finally:
            ray.shutdown()


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
