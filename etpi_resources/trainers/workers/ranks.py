"""A worker as several processes of this machine, through PyTorch's own launcher.

Belongs here: starting them, ending the others when one fails, and saying which failed first and why. Does not belong
here: what they do (`sharding`), or starting this program (`trainers.pipes`).

`python -m etpi_resources.trainers.workers.ranks N MODULE FOLDER` runs `python -m MODULE FOLDER` N times, with RANK and
WORLD_SIZE in the environment; the processes meet at a free port of the loopback interface.
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
"""Seconds the others have to end when one has failed."""


def launch(processes: int, module: str, folder: Path) -> int:
    """Run the worker to its end; the status to exit with: that of the process that failed first, or 128 + N where
    signal N ended it."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Left alone, every process would have a thread a core.
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
        # When one is killed the others fail too, their peer being gone, and may be seen first.
        rank, failure = min(failed.failures.items(), key=lambda found: (found[1].exitcode > 0, found[1].timestamp))
        if failure.exitcode < 0:
            how = f"was ended by {signal.Signals(-failure.exitcode).name}"
        else:
            said: Any = failure.message  # as the worker recorded it, or a word of how to make it record one
            reason = f": {said['message']}" if isinstance(said, dict) else ""
            how = f"failed with status {failure.exitcode}{reason}"
        print(f"process {rank} of {processes} {how}; the others were ended", file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as asked:
        return 128 + asked.sigval
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
