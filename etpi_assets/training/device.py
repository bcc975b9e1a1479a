"""The device that a training would run on, looked up before it starts.

Belongs here: facts about the trainer's device that name a training, and whether the worker saw the same. Does not
belong here: what a dtype means on it (`precision`), or using it (the workers).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Any

from etpi_assets.resources import accelerators
from etpi_resources.trainers.pipes import ROOT, WorkerFailed, trainer_python
from etpi_resources.trainers.workers import precision
from etpi_resources.trainers.workers.precision import Dtype, Gpu, SpecDtype, training_dtype


def dtype_here(requested: SpecDtype) -> Dtype:
    """The dtype that a training with this `dtype` in its spec computes in on this machine."""
    return training_dtype(requested, trainer_gpu())


def confirm_dtype(report: Mapping[str, Any], expected: Dtype, label: str) -> None:
    """Raise WorkerFailed where the worker computed in another dtype than the training is named by."""
    if report["dtype"] != expected:
        raise WorkerFailed(
            f"{label}: the worker trained in {report['dtype']} on {report['device']}, and {expected} was expected of "
            "this machine, so the result is not kept. Did its GPU come or go meanwhile? Run it again"
        )


@cache
def trainer_gpu() -> Gpu | None:
    """The GPU that a worker's interpreter sees, which may have another torch than this one. Without a device file no
    interpreter is started.

    Raises:
        RuntimeError: the interpreter cannot say; the message holds its last line.
    """
    if not accelerators():
        return None
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [trainer_python(), "-m", precision.MODULE]
    probe = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(
            f"{' '.join(command)} failed with status {probe.returncode}: {last}. It is to say whether its torch sees a "
            "GPU; repair that interpreter, or name another one in ETPI_TRAINER_PYTHON"
        )
    answer = json.loads(probe.stdout.splitlines()[-1])
    return answer and Gpu(**answer)
