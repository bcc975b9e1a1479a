"""Start a worker as several processes of this machine with PyTorch's elastic launcher; if one fails, end the others.

`python -m etpi_resources.trainers.workers.ranks N MODULE FOLDER` runs `python -m MODULE FOLDER` N times, with RANK and
WORLD_SIZE in the environment; the processes connect over a free port of the loopback interface.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

MODULE = "etpi_resources.trainers.workers.ranks"
LOOPBACK = "127.0.0.1"
GRACE = 5
"""Seconds that the other processes have to end after one has failed."""


def launch(processes: int, module: str, folder: Path) -> int:
    """Run the worker to its end; return the exit status of the process that failed first, or 128 + N if signal N killed
    it."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # By default every process would start a thread per core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=folder.name, rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0", local_addr=LOOPBACK, max_restarts=0, shutdown_timeout=GRACE,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "ranks")),
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", module, str(folder))
    except ChildFailedError as failed:
        # When one process is killed the others fail because their peer is gone, and may be reported first. SIGTERM is
        # how the launcher itself stops the others.
        rank, failure = min(
            failed.failures.items(),
            key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].exitcode > 0, item[1].timestamp),
        )
        if failure.exitcode < 0:
            how = f"was killed by {signal.Signals(-failure.exitcode).name}"
        else:
            message: Any = failure.message  # a dict where the worker recorded its error
            reason = f": {message['message']}" if isinstance(message, dict) else ""
            how = f"failed with status {failure.exitcode}{reason}"
        print(f"rank {rank} of {processes} {how}; the other ranks were stopped", file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as received:
        return 128 + received.sigval
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a worker as several processes.")
    parser.add_argument("processes", type=int)
    parser.add_argument("module")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    sys.exit(launch(options.processes, options.module, options.folder))


if __name__ == "__main__":
    main()
