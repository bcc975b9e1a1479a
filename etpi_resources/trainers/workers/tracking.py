"""A worker's trackers: the arguments with which transformers creates its callbacks for them, and runs without training.

A tracker that fails is switched off with a warning, at whatever moment: training and its log in the lake go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etpi_resources.trainers.contracts import Tracker, Tracking
from etpi_resources.trainers.trackers import require_trackers
from etpi_resources.trainers.workers.reporting import Worker

PROJECT = "etpi"
PROJECT_VARIABLES = {"trackio": "TRACKIO_PROJECT", "wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}
UNTRACKED: Mapping[str, Any] = {"report_to": "none"}
"""Trainer arguments without a tracker."""

_INTEGRATIONS = "transformers.integrations.integration_utils"


def tracking_arguments(worker: Worker[Any], *, resumed: bool = False) -> Mapping[str, Any]:
    """Begin a run of the worker's trackers; return the arguments of its trainer. Ranks other than 0 report nothing.

    Raises:
        TrackerMissing: a library is not installed.
    """
    tracking: Tracking | None = worker.config.tracking
    if tracking is None or not worker.is_rank_0:
        return UNTRACKED
    name = begin_run(tracking, resumed=resumed)
    worker.log(f"{worker.config.label}: reporting to {', '.join(tracking.report_to)} as {name}")
    return {
        "report_to": list(tracking.report_to),
        "run_name": name,
        "project": _project("trackio"),
        "trackio_static_space_id": False,  # else it would publish a copy of the run
    }


def begin_run(tracking: Tracking, *, resumed: bool = False) -> str:
    """Set the defaults of the trackers' environment; return the name of the run.

    A name that was used before gets a number, "...-2", because trackers add to a run of the same name. A resumed run
    goes on under its own.
    """
    require_trackers(tracking.report_to)
    folder = Path(tracking.folder)
    name = _numbered(folder / "runs" / tracking.run_name, resumed)
    board = os.environ.get("TENSORBOARD_LOGGING_DIR") or str(folder / "tensorboard")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(Path(board) / name)
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
    os.environ.setdefault("WANDB_DIR", str(folder / "wandb"))
    os.environ.setdefault("MLFLOW_TRACKING_URI", (folder / "mlflow").absolute().as_uri())
    for variable in PROJECT_VARIABLES.values():
        os.environ.setdefault(variable, PROJECT)
    if "wandb" in tracking.report_to:  # it falls back to another folder if this one does not exist
        Path(os.environ["WANDB_DIR"]).mkdir(parents=True, exist_ok=True)
    return name


def _numbered(counter: Path, resumed: bool) -> str:
    """Count a start in the file `counter`; return its name with the number of starts, from the second on."""
    starts = int(counter.read_text()) if counter.exists() else 0
    starts = max(1, starts if resumed else starts + 1)
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(f"{starts}\n")
    return counter.name if starts == 1 else f"{counter.name}-{starts}"


def survive_trackers(trainer: Any, log: Callable[[str], None]) -> None:
    """Let no error of a tracker's callback end the training: it is logged, and the tracker is called no more."""
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__module__ == _INTEGRATIONS:
            _guard(callback, log)


def _guard(callback: Any, log: Callable[[str], None]) -> None:
    from transformers import TrainerCallback

    failed = False

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal failed
            if failed:
                return None
            try:
                return method(*arguments, **named)
            except Exception as error:
                failed = True
                log(
                    f"WARNING: {type(callback).__name__} failed and is off for the rest of this training, whose steps "
                    f"are in training_log all the same: {type(error).__name__}: {error}"
                )
                return None

        return call

    for event in (name for name in dir(TrainerCallback) if name.startswith("on_")):
        setattr(callback, event, guarded(getattr(callback, event)))


# --- runs without training -------------------------------------------------------------------------------------------


def _project(tracker: Tracker) -> str:
    """Return the tracker's project: that of its own variable, if it has one that is set."""
    variable = PROJECT_VARIABLES.get(tracker)
    return os.environ.get(variable, PROJECT) if variable else PROJECT


def log_values(tracker: Tracker, name: str, values: Mapping[str, float]) -> None:
    """Report a run of these values to one tracker, with its own API, after `begin_run`."""
    project = _project(tracker)
    match tracker:
        case "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(log_dir=os.environ["TENSORBOARD_LOGGING_DIR"]) as writer:
                for tag, value in values.items():
                    writer.add_scalar(tag, value, 0)
        case "trackio":
            import trackio

            trackio.init(project=project, name=name, auto_log_gpu=False, auto_log_cpu=False)
            trackio.log(dict(values))
            trackio.finish()
        case "wandb":
            import wandb  # pyright: ignore[reportMissingImports]

            run = wandb.init(project=project, name=name, job_type="evaluation")
            run.log(dict(values))
            run.finish()
        case "mlflow":
            import mlflow  # pyright: ignore[reportMissingImports]

            mlflow.set_experiment(project)
            with mlflow.start_run(run_name=name):
                mlflow.log_metrics(dict(values))
