"""The part of a training over several nodes that runs on each node, in an actor of Ray (`over_nodes` starts it)."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from etpi_resources.backend import BackendError
from etpi_resources.process.supervise import supervised
from etpi_resources.trainers.interpreter import worker_command, worker_environment
from etpi_resources.trainers.workers import ranks
from etpi_resources.trainers.workers.reporting import CONFIG_FILE, RESULT_FILE

GPU = "GPU"
FOLDER_SECONDS = 30.0
"""Time that a node waits for the training's folder to appear: network file systems cache what is absent."""


class NodeLauncher:
    """The body of the actor that starts one node's share of the ranks; all of its calls return at once but `stop`."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._listener: socket.socket | None = None

    def devices(self) -> list[str]:
        """Return the GPUs that Ray reserved for this actor."""
        import ray

        return [str(device) for device in ray.get_runtime_context().get_accelerator_ids().get(GPU, [])]

    def listen(self, address: str) -> int:
        """Open the port where the ranks meet, on this address alone; return its number."""
        self._listener = ranks.listen(address)
        return self._listener.getsockname()[1]

    def start(
        self, module: str, folder: str, arguments: list[str], environment: Mapping[str, str], grace: float
    ) -> None:
        """Start the launcher under a supervisor, which ends it when this actor ends, however it ends.

        Raises:
            BackendError: this node has no such folder.
        """
        _await_file(Path(folder) / CONFIG_FILE)
        variables = worker_environment()
        variables.pop("OMP_NUM_THREADS", None)  # Ray sets it to the actor's CPUs
        passed: tuple[int, ...] = ()
        if self._listener is not None:
            passed = (self._listener.fileno(),)
            arguments = [*arguments, "--listener", str(self._listener.fileno())]
        count, *options = arguments
        command = worker_command("-m", ranks.MODULE, count, module, folder, *options)
        self._process = subprocess.Popen(
            supervised(command, grace=grace), env={**variables, **environment}, pass_fds=passed,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        if self._listener is not None:
            self._listener.close()
        self._reader = threading.Thread(target=self._read, name="ranks", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n"))

    def poll(self) -> tuple[list[str], int | None]:
        """Return the lines since the last call, and the exit status once the launcher and all its processes ended."""
        assert self._process is not None and self._reader is not None
        status = self._process.poll()
        if status is not None:
            self._reader.join(timeout=5.0)
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return lines, status

    def result(self, folder: str) -> str | None:
        """Return the result that rank 0 left on this node; another node might not see the file yet."""
        path = Path(folder) / RESULT_FILE
        return path.read_text() if path.exists() else None

    def stop(self) -> None:
        """End the launcher and all its processes."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def _await_file(path: Path) -> None:
    until = time.monotonic() + FOLDER_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            raise BackendError(
                f"{path} is not on node {socket.gethostname()}; every node needs the lake's folder at the same path"
            )
        time.sleep(0.5)
