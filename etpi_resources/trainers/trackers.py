"""Trackers of experiments: what a training reports to besides the lake, where their files are, and what they need.

Their own files are in `trackers/` of the lake: `tensorboard/<run>`, `trackio`, `wandb`, `mlflow`. A variable of the
library itself (`TENSORBOARD_LOGGING_DIR`, `TRACKIO_DIR`, `WANDB_DIR`, `MLFLOW_TRACKING_URI`) overrides that. A worker
has the environment of the process that starts it, so keys of a service are read from there and are in no file of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from etpi_resources.errors import ExpectedError
from etpi_resources.trainers.contracts import Tracker, Tracking

if TYPE_CHECKING:
    from etpi_resources.lake.lake import Lake

FOLDER = "trackers"


class TrackerMissing(ExpectedError, RuntimeError):
    """A tracker of `train.report_to` is not installed; the message has the command that installs it."""


def tracking_of(lake: Lake, report_to: Sequence[Tracker], run_name: str) -> Tracking | None:
    """Return what a worker reports to, None if that is nothing; the trackers' files are in this lake."""
    if not report_to:
        return None
    return Tracking(report_to=tuple(report_to), run_name=run_name, folder=str(lake.root / FOLDER))


def require_trackers(report_to: Sequence[Tracker]) -> None:
    """Raise TrackerMissing if this interpreter lacks one; each is a package of the same name."""
    if missing := [tracker for tracker in report_to if find_spec(tracker) is None]:
        raise TrackerMissing(
            f"train.report_to needs {' and '.join(missing)} in the interpreter that trains: "
            f"pip install {' '.join(missing)}, or remove the name from train.report_to"
        )
