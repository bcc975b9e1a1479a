"""Start a worker as several processes, its ranks, on this machine; if one fails, end the others and say which it was.

`python -m etpi_resources.trainers.workers.ranks N MODULE FOLDER` runs `python -m MODULE FOLDER` N times, with RANK and
WORLD_SIZE in the environment. N is all ranks, or this node's share of a worker that spans nodes (`over_nodes` starts a
launcher on each). The ranks meet at a store of the launcher that has rank 0. It listens on one address only: the
loopback interface, or the address that the nodes know each other by. PyTorch's own launcher listens on all interfaces.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict

MODULE = "etpi_resources.trainers.workers.ranks"
LOOPBACK = "127.0.0.1"
GRACE = 5.0
"""Seconds that the other ranks have to end after one has failed."""
SETTLE_SECONDS = 0.5
"""Time to wait, after the first failure, for others: a killed rank makes the others fail, maybe noticed first."""
POLL_SECONDS = 0.05
LAST_LINES = 20
FAILURE_MARK = "etpi-failed-rank "
"""Begins a line of stdout that is a RankFailure as JSON, where the worker spans nodes."""


class RankFailure(BaseModel):
    """The end of a rank.

    Attributes:
        status: of the process; -N if signal N ended it. reason: the error that it recorded, if it did.
        at: Unix time in seconds. lines: the last of its output.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int
    world: int
    status: int
    reason: str | None
    at: float
    lines: tuple[str, ...]

    @property
    def how(self) -> str:
        if self.status < 0:
            return f"was killed by {signal.Signals(-self.status).name}"
        return f"failed with status {self.status}" + (f": {self.reason}" if self.reason else "")


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the failure that caused the others.

    When a rank is killed, the others fail because their peer is gone. SIGTERM is how a launcher stops ranks.
    """
    return min(failures, key=lambda f: (f.status == -signal.SIGTERM, f.status > 0, f.at))


@dataclass(frozen=True)
class Share:
    """The ranks of one launcher: `count` of `world`, from `first` on; `address` and `port` are those of the store.

    Attributes:
        listener: a bound socket's descriptor for the store; None if the store is another launcher's.
        here: the address of this node that its ranks connect from.
    """

    first: int
    count: int
    world: int
    address: str
    port: int
    here: str
    listener: int | None


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of this address alone."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(512)
    return listener


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an IPv4 address; all of 127.0.0.0/8 is the loopback's.

    Raises:
        OSError: none has.
    """
    if address.startswith("127."):
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name.partition(":")[0]
    raise OSError(f"no network interface of {socket.gethostname()} has the address {address}")


class _Rank:
    """One running rank: forwards its output line by line, and keeps the last lines."""

    def __init__(self, share: Share, local: int, module: str, folder: Path) -> None:
        self.rank, self._world = share.first + local, share.world
        self._error_file = folder / "ranks" / f"rank-{self.rank}-error.json"
        self._error_file.parent.mkdir(exist_ok=True)
        self._error_file.unlink(missing_ok=True)
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._ended: float | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            env={**os.environ, **_environment(share, local), "TORCHELASTIC_ERROR_FILE": str(self._error_file)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        self._reader = threading.Thread(target=self._forward, name=f"rank {self.rank}", daemon=True)
        self._reader.start()

    def _forward(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line.rstrip("\n"))
            sys.stdout.write(line)
            sys.stdout.flush()

    def status(self) -> int | None:
        """Return the exit status once the rank has ended; -N for signal N."""
        status = self.process.poll()
        if status is not None and self._ended is None:
            self._ended = time.time()
        return status

    def failure(self) -> RankFailure | None:
        """Return how the rank failed, if it did."""
        status = self.status()
        if not status:
            return None
        self._reader.join(timeout=1.0)
        reason = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            message: Any = json.loads(self._error_file.read_text())["message"]
            reason = message["message"] if isinstance(message, dict) else str(message)
        return RankFailure(
            rank=self.rank, world=self._world, status=status, reason=reason, at=self._ended or 0.0,
            lines=tuple(self._lines),
        )  # fmt: skip


def _environment(share: Share, local: int) -> dict[str, str]:
    """Return the variables by which PyTorch, accelerate, gloo and NCCL know a rank and where to meet."""
    interface = interface_of(share.here)
    threads = max(1, len(os.sched_getaffinity(0)) // share.count)
    defaults = {
        # By default every process would start a thread per core.
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }
    return {name: os.environ.get(name, value) for name, value in defaults.items()} | {
        "RANK": str(share.first + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(share.world),
        "LOCAL_WORLD_SIZE": str(share.count),
        "MASTER_ADDR": share.address,
        "MASTER_PORT": str(share.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }


def launch(share: Share, module: str, folder: Path, *, report: bool) -> int:
    """Run this launcher's ranks to their end; return 0, or the exit status of the one that failed first, 128 + N if
    signal N killed it.

    Args:
        report: write the failure as a marked line, for a launcher of several nodes; otherwise as a sentence.
    """
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    store = _open_store(share)
    ranks = [_Rank(share, local, module, folder) for local in range(share.count)]
    try:
        while not stopped.wait(POLL_SECONDS):
            statuses = [rank.status() for rank in ranks]
            if any(statuses):
                break
            if all(status == 0 for status in statuses):
                return 0
        failures = [] if stopped.is_set() else _failures(ranks)
    finally:
        _end(ranks)
        del store
    if not failures:
        return 128 + signal.SIGTERM
    failure = root_cause(failures)
    if report:
        print(f"{FAILURE_MARK}{failure.model_dump_json()}", flush=True)
    else:
        print(f"rank {failure.rank} of {failure.world} {failure.how}; the other ranks were stopped", flush=True)
    return failure.status if failure.status > 0 else 128 - failure.status


def launch_here(processes: int, module: str, folder: Path) -> int:
    """Run all ranks of a worker on this machine; return as `launch` does."""
    listener = listen(LOOPBACK)
    address, port = listener.getsockname()
    share = Share(0, processes, processes, address, port, LOOPBACK, listener.detach())
    return launch(share, module, folder, report=False)


def _open_store(share: Share) -> Any:
    """Return the store that the ranks meet at, if it is this launcher's."""
    if share.listener is None:
        return None
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(share.address, share.port, is_master=True, wait_for_workers=False, master_listen_fd=share.listener)


def _failures(ranks: Sequence[_Rank]) -> list[RankFailure]:
    """Return all failures until a short time after the first."""
    until = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < until and any(rank.status() is None for rank in ranks):
        time.sleep(POLL_SECONDS / 5)
    return [failure for rank in ranks if (failure := rank.failure()) is not None]


def _end(ranks: Sequence[_Rank]) -> None:
    """Stop the ranks that still run: SIGTERM, then SIGKILL."""
    for rank in ranks:
        if rank.status() is None:
            rank.process.terminate()
    until = time.monotonic() + GRACE
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, until - time.monotonic()))
        if rank.status() is None:
            rank.process.kill()
            rank.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a worker as several processes.")
    parser.add_argument("processes", type=int, help="ranks that this launcher starts")
    parser.add_argument("module")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--world", type=int, help="number of all ranks, if other nodes have some")
    parser.add_argument("--store", metavar="ADDRESS:PORT", help="where the ranks meet")
    parser.add_argument("--here", default=LOOPBACK, help="this node's address")
    parser.add_argument("--listener", type=int, help="descriptor of the socket that listens there, if it is ours")
    options = parser.parse_args()
    if options.store is None:
        sys.exit(launch_here(options.processes, options.module, options.folder))
    address, _, port = options.store.rpartition(":")
    world = options.world or options.processes
    share = Share(options.first, options.processes, world, address, int(port), options.here, options.listener)
    sys.exit(launch(share, options.module, options.folder, report=True))


if __name__ == "__main__":
    main()
