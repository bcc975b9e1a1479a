"""The interpreter and the environment that workers run in, on the node where they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from etpi_resources.trainers import precision
from etpi_resources.trainers.precision import Gpu

PYTHON_VARIABLE = "ETPI_TRAINER_PYTHON"
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT: Mapping[str, str] = {
    # Idle threads sleep instead of spinning, because other processes want the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # By default glibc returns large freed tensors to the kernel and faults them in again at the next step. Keeping them
    # made eager attention over 8 x 896 tokens three times as fast.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Defaults of every worker's environment; the launcher's own variables override them."""


def trainer_python() -> str:
    """Return the interpreter that runs workers: $ETPI_TRAINER_PYTHON, or this one."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def worker_environment() -> dict[str, str]:
    """Return a worker's environment: this process's over the defaults, with these packages importable."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**ENVIRONMENT, **os.environ, "PYTHONPATH": path}


def worker_command(*arguments: str) -> list[str]:
    """Return the command line `python ARGUMENTS`.

    Raises:
        FileNotFoundError: the interpreter does not exist.
    """
    python = trainer_python()
    if not Path(python).exists():
        raise FileNotFoundError(f"{PYTHON_VARIABLE} names {python}, which does not exist")
    return [python, *arguments]


def visible(first: int, count: int) -> dict[str, str]:
    """Return the variable that lets a process see `count` of the GPUs that this one may use, from place `first` on.

    A library that sees more GPUs than it has ranks would use all of them (`torch.nn.DataParallel`).
    """
    named = os.environ.get(DEVICES_VARIABLE)
    usable = [str(n) for n in range(first + count)] if named is None else list(filter(None, named.split(",")))
    return {DEVICES_VARIABLE: ",".join(usable[first : first + count])}


def find_trainer_gpu(*, hidden: bool = False) -> Gpu | None:
    """Return the GPU that the workers' interpreter sees on this node.

    Args:
        hidden: look at GPUs too that Ray hides from this process.

    Raises:
        RuntimeError: the interpreter failed; the message holds its last line.
    """
    command = worker_command("-m", precision.MODULE)
    environment = worker_environment()
    if hidden:
        environment.pop(DEVICES_VARIABLE, None)
    probe = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(
            f"{' '.join(command)} failed with status {probe.returncode}: {last}. It checks whether torch sees a GPU; "
            "repair that interpreter, or name another one in ETPI_TRAINER_PYTHON"
        )
    gpu = json.loads(probe.stdout.splitlines()[-1])
    return gpu and Gpu(**gpu)
