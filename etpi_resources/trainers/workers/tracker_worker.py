"""Report values, such as the metrics of an evaluation, to trackers, in a process that cannot hang the asset."""

from __future__ import annotations

import signal

from etpi_resources.trainers.contracts import TrackerWorkerConfig, TrackerWorkerResult
from etpi_resources.trainers.workers.reporting import Worker, open_worker
from etpi_resources.trainers.workers.tracking import begin_run, log_values

MODULE = "etpi_resources.trainers.workers.tracker_worker"
SECONDS = 180
"""After this time the process ends itself: the tracker's service does not respond."""


def run(worker: Worker[TrackerWorkerConfig]) -> TrackerWorkerResult:
    """Report to every tracker, also after one has failed.

    Raises:
        TrackerMissing: a library is not installed.
        RuntimeError: trackers failed; the message names them.
    """
    tracking = worker.config.tracking
    name = begin_run(tracking)
    failures = []
    for tracker in tracking.report_to:
        try:
            log_values(tracker, name, worker.config.values)
        except Exception as error:  # one service that is down must not keep the values from the others
            failures.append(f"{tracker}: {type(error).__name__}: {error}")
    if failures:
        raise RuntimeError("; ".join(failures))
    return TrackerWorkerResult(run_name=name)


if __name__ == "__main__":
    signal.alarm(SECONDS)
    with open_worker(TrackerWorkerConfig) as worker:
        worker.finish(run(worker))
