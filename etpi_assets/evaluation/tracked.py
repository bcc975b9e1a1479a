"""Reports an evaluation's pooled metrics to the trackers of `train.report_to`, as a run `<experiment>-eval`."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pyarrow as pa

from etpi_resources.lake.lake import Lake
from etpi_resources.trainers.contracts import Tracker, TrackerWorkerConfig, TrackerWorkerResult
from etpi_resources.trainers.pipes import run_worker
from etpi_resources.trainers.trackers import tracking_of
from etpi_resources.trainers.workers.tracker_worker import MODULE


def report_metrics(
    lake: Lake, experiment: str, report_to: tuple[Tracker, ...], metrics: pa.Table, log: Callable[[str], None]
) -> None:
    """Report the rows of `metrics` that are pooled over seeds, "<role>/<decoding>/<metric>" each.

    A failure is logged as a warning: the metrics are in the lake, and no tracker makes an evaluation fail.
    """
    tracking = tracking_of(lake, report_to, f"{experiment}-eval")
    if tracking is None or not (values := pooled(metrics)):
        return
    folder = lake.scratch("trackers") / experiment
    lines: list[str] = []
    try:
        config = TrackerWorkerConfig(tracking=tracking, values=values)
        done = run_worker(MODULE, config, folder, TrackerWorkerResult, echo=lines.append)
    except Exception as error:  # see above
        log(f"WARNING: the metrics of {experiment} were not reported to {', '.join(report_to)}: {error}")
    else:
        log(f"{len(values)} metrics reported to {', '.join(report_to)} as {done.run_name}")
    shutil.rmtree(folder, ignore_errors=True)


def pooled(metrics: pa.Table) -> dict[str, float]:
    """Return {"role/decoding/metric": value} of the rows pooled over seeds that have a value."""
    return {
        "/".join(row[name] or "-" for name in ("checkpoint_role", "decoding", "metric")): row["value"]
        for row in metrics.to_pylist()
        if row["seed"] is None and row["value"] is not None
    }
