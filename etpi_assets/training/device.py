"""Looks up, before a training starts, the device and dtype that it will use; both are part of its key."""

from __future__ import annotations

from functools import cache

from etpi_assets.resources import accelerators
from etpi_resources.backend import backend
from etpi_resources.trainers.contracts import TrainingFigures
from etpi_resources.trainers.interpreter import find_trainer_gpu
from etpi_resources.trainers.pipes import WorkerFailed
from etpi_resources.trainers.precision import Dtype, Gpu, SpecDtype, training_dtype


def dtype_here(requested: SpecDtype, processes: int = 1) -> Dtype:
    """Resolve the requested dtype for a training of `processes` ranks that is started here."""
    return training_dtype(requested, trainer_gpu(processes))


def confirm_dtype(report: TrainingFigures, expected: Dtype, label: str) -> None:
    """Raise WorkerFailed if the worker computed in another dtype than the training's key has."""
    if report.dtype != expected:
        raise WorkerFailed(
            f"{label}: the worker trained in {report.dtype} on {report.device}, but this machine was expected to use "
            f"{expected}, so the result is not kept. Did the GPU become available or unavailable? Run it again"
        )


@cache
def trainer_gpu(processes: int = 1) -> Gpu | None:
    """Return the GPU that the workers' interpreter sees; its torch may differ from this interpreter's.

    The workers' interpreter is started only if the machine has a device file of an accelerator. Of a training that
    spans nodes, the GPU is another node's.

    Raises:
        RuntimeError: the interpreter failed; the message holds its last line.
    """
    if (elsewhere := backend()) and elsewhere.spans_nodes(processes):
        return elsewhere.gpu_of_ranks()
    return find_trainer_gpu() if accelerators() else None
