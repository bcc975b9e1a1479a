"""Looks up, before a training starts, the device and dtype that it will use; both are part of its key."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache

from etpi_assets.resources import accelerators
from etpi_resources.trainers.contracts import TrainingFigures
from etpi_resources.trainers.interpreter import ROOT, trainer_python
from etpi_resources.trainers.pipes import WorkerFailed
from etpi_resources.trainers.workers import precision
from etpi_resources.trainers.workers.precision import Dtype, Gpu, SpecDtype, training_dtype


def dtype_here(requested: SpecDtype) -> Dtype:
    """Return the dtype that a training computes in on this machine if its spec requests `requested`."""
    return training_dtype(requested, trainer_gpu())


def confirm_dtype(report: TrainingFigures, expected: Dtype, label: str) -> None:
    """Raise WorkerFailed if the worker computed in another dtype than the training's key has."""
    if report.dtype != expected:
        raise WorkerFailed(
            f"{label}: the worker trained in {report.dtype} on {report.device}, but this machine was expected to use "
            f"{expected}, so the result is not kept. Did the GPU become available or unavailable? Run it again"
        )


@cache
def trainer_gpu() -> Gpu | None:
    """Return the GPU that the workers' interpreter sees; its torch may differ from this interpreter's.

    The workers' interpreter is started only if the machine has a device file of an accelerator.

    Raises:
        RuntimeError: the interpreter failed; the message holds its last line.
    """
    if not accelerators():
        return None
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [trainer_python(), "-m", precision.MODULE]
    probe = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(
            f"{' '.join(command)} failed with status {probe.returncode}: {last}. It checks whether torch sees a GPU; "
            "repair that interpreter, or name another one in ETPI_TRAINER_PYTHON"
        )
    gpu = json.loads(probe.stdout.splitlines()[-1])
    return gpu and Gpu(**gpu)
