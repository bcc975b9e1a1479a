"""A Ray cluster of several raylets on this machine, on loopback, for tests; and a `cluster.toml` that names it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from etpi_resources.process.supervise import descendants, supervised
from tests.support.web_server import free_port

START_SECONDS = 180.0
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
"""Ray kills workers where a machine's memory is 95 % full, whoever uses it."""
TIMED_OUT = "The current node timed out during startup"
"""What Ray says where a node needs more than 30 s, a constant: on a busy machine it is started again."""
ROOT = Path(__file__).parents[2]
MEMORY = 100_000_000
NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install etpi-cluster")
CONNECTED: list[RayNodes] = []
"""The cluster that this process is connected to."""


class RayNodes:
    """A head that offers the resources `head` alone, and nodes that are added and killed. The temporary folder's path
    must be short.

    Attributes:
        settings: the `cluster.toml`.
        address: the head's.
    """

    def __init__(
        self,
        folder: Path,
        lake: Path,
        address: str = "127.0.0.1",
        *,
        head: Mapping[str, float] | None = None,
        accelerator: str = "GPU",
        postgres: str = "postgresql://nobody@127.0.0.1/none",
        jobs: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`jobs`: with a dashboard, which takes jobs; they run in the environment that their node was started in."""
        self._folder, self._ip, self._nodes = folder, address, dict[str, subprocess.Popen[bytes]]()
        self._port = free_port(address)
        self.address = f"{address}:{self._port}"
        self.settings = folder / "cluster.toml"
        port = free_port(address) if jobs else 1
        text = f'lake = "{lake}"\npostgres = "{postgres}"\naccelerator = "{accelerator}"\n'
        self.settings.write_text(f'{text}ray = "{self.address}"\njobs = "http://{address}:{port}"\n')
        options = ["--head", f"--port={self._port}", "--num-cpus=0", "--num-gpus=0", "--node-name=head"]
        options += [f"--include-dashboard={str(jobs).lower()}"]
        options += [f"--dashboard-host={address}", f"--dashboard-port={port}"] if jobs else []
        named = [*options, f"--resources={json.dumps(dict(head or {}))}"]
        self._start("head", named, address, environment=environment)

    def add(
        self,
        name: str,
        *,
        slots: int = 0,
        cpus: int = 1,
        gpus: int = 0,
        address: str | None = None,
        resources: Mapping[str, float] | None = None,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a node that offers so many rollouts at once, and other resources; `address` is the head's if None."""
        offered = {**({"etpi_sandbox": slots} if slots else {}), **(resources or {})}
        options = [f"--address={self.address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--node-name={name}"]
        self._start(name, [*options, f"--resources={json.dumps(offered)}"], address or self._ip, prefix, environment)

    def pids(self, name: str, command: str) -> list[int]:
        """Return the processes of a node whose command line contains a text, "raylet/raylet" or "ray::" for example."""
        return [pid for pid in descendants(self._nodes[name].pid) if command in command_line(pid)]

    def end(self, name: str) -> None:
        """Take a node away at once, as if its machine lost power: every process of it is killed."""
        for pid in [*descendants(self._nodes[name].pid), self._nodes[name].pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

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
        address: str,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
        command += [f"--node-ip-address={address}", f"--object-store-memory={MEMORY}", "--disable-usage-stats"]
        # By default the agents of all nodes of an address take one port; the head's must have one to start jobs.
        command += [f"--dashboard-agent-listen-port={free_port(address)}"]
        if "--head" in options:
            command += [f"--temp-dir={self._folder}"]
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "ETPI_"))}
        environment = {**clean, **QUIET, "PYTHONPATH": str(ROOT), **(environment or {})}
        for last in (False, False, True):
            if output := self._started(name, command, environment):
                if last or TIMED_OUT not in output:
                    raise RuntimeError(f"{name} did not start:\n{output[-2000:]}")
                continue
            return

    def _started(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """Start a node; return its output if it ended or was too slow, "" if it runs."""
        log = self._folder.parent / f"{self._folder.name}-{name}.log"
        with log.open("wb") as file:
            self._nodes[name] = subprocess.Popen(
                supervised(command, grace=3.0), env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in log.read_text(errors="replace"):
            if self._nodes[name].poll() is not None or time.monotonic() > deadline:
                return log.read_text(errors="replace") or "(nothing)"
            time.sleep(0.1)
        return ""


@contextmanager
def connected(cluster: RayNodes) -> Iterator[None]:
    """Let this process use the cluster as a step does; afterwards it is disconnected."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ETPI_CLUSTER", str(cluster.settings))
        CONNECTED.append(cluster)
        try:
            yield
        finally:
            CONNECTED.remove(cluster)
            ray.shutdown()


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
