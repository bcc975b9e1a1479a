"""The states that a killed fine-tuning continues from: weights, optimiser, learning rates, random generators, log.

Every rank writes its own shards (PyTorch's distributed checkpoints) into `states/step-N` of the worker's folder, which
several nodes share. Each file is flushed to disk before its writer says so; the marker is written after all of them, so
a node that sees the marker reads whole files, on a network file system with close-to-open consistency too.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etpi_resources.lake.files import sync, write_atomically

if TYPE_CHECKING:
    from etpi_resources.trainers.workers.weighted_trainer import StepLog, WeightedSFTTrainer

FOLDER = "states"
COMPLETE_MARK = "complete.json"
"""A file in a state, written after all others; holds what the state belongs to."""
KEPT = 2
TRAINER_STATE = "trainer_state.json"
LOG = "log.json"


def last_complete_step(folder: Path) -> int | None:
    """Return the step of the newest complete state in a worker's folder, if there is one."""
    steps = [_step(mark.parent) for mark in (folder / FOLDER).glob(f"step-*/{COMPLETE_MARK}")]
    return max(steps, default=None)


class States:
    """Saves states of a training at most every `seconds`, and restores the newest.

    Args:
        folder: the worker's.
        seconds: least time between two states; 0 saves one after each step.
    """

    def __init__(self, folder: Path, trainer: WeightedSFTTrainer, seconds: float) -> None:
        self._folder, self._trainer, self._seconds = folder, trainer, seconds
        self._saved_at = time.monotonic()
        trainer.states = self

    @property
    def _plan(self) -> dict[str, Any]:
        """Return the values that a state must share with the run that continues from it."""
        plan = self._trainer.plan
        return {
            "ranks": self._trainer.args.world_size,
            "steps": plan.steps,
            "accumulate": plan.accumulate,
            "batches": hashlib.sha256(repr(plan.batches).encode()).hexdigest(),
            "step_weight": plan.step_weight,
        }

    # --- saving ------------------------------------------------------------------------------------------------------

    def save_if_due(self, step: int, log: StepLog) -> None:
        """Save a state after a step, if the last is old enough. A collective: every rank calls it."""
        if step >= self._trainer.plan.steps or not _of_rank_0(time.monotonic() - self._saved_at >= self._seconds):
            return
        began, wait = time.monotonic(), self._trainer.accelerator.wait_for_everyone
        folder = self._folder / FOLDER / f"step-{step}"
        if self._is_rank_0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        wait()
        write_shards(self._trainer, folder)
        self._write_rank(folder)
        wait()
        if self._is_rank_0:
            self._trainer.state.save_to_json(str(folder / TRAINER_STATE))
            sync(folder / TRAINER_STATE)
            write_atomically(folder / LOG, json.dumps(log.state()))
            write_atomically(folder / COMPLETE_MARK, json.dumps({"step": step, **self._plan}))
            self._remove_old()
        # Where saving takes long, the time between states grows with it.
        self._saved_at = time.monotonic() + 9 * (time.monotonic() - began) * bool(self._seconds)

    @property
    def _is_rank_0(self) -> bool:
        return self._trainer.args.process_index == 0

    @property
    def _rank_file(self) -> str:
        return f"rank-{self._trainer.args.process_index}.pt"

    def _write_rank(self, folder: Path) -> None:
        """Write this rank's own state: random generators, counts of the passes since the last log line."""
        import torch

        trainer: Any = self._trainer
        trainer._save_rng_state(str(folder))
        counts = {"window": _as_tensors(trainer.window), "first_pass": _as_tensors(trainer.first_pass)}
        torch.save({**counts, "scheduler": trainer.lr_scheduler.state_dict()}, folder / self._rank_file)
        for path in (*folder.glob("rng_state*"), folder / self._rank_file, folder):
            sync(path)

    def _remove_old(self) -> None:
        states = sorted((self._folder / FOLDER).glob("step-*"), key=_step)
        for old in states[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    # --- continuing --------------------------------------------------------------------------------------------------

    def newest(self, log: Callable[[str], None]) -> int | None:
        """Return the step to continue from: rank 0 finds it, and every rank gets it. A collective."""
        step = None
        if self._is_rank_0 and (step := last_complete_step(self._folder)) is not None:
            mark = json.loads((self.folder_of(step) / COMPLETE_MARK).read_text())
            if mark != {"step": step, **self._plan}:
                log(f"the state of step {step} belongs to other batches or another number of ranks: starting again")
                step = None
        step = _of_rank_0(step)
        if step is not None:
            self._trainer.resumed_at = step
        return step

    def folder_of(self, step: int) -> Path:
        return self._folder / FOLDER / f"step-{step}"

    def log_of(self, step: int) -> dict[str, Any]:
        return json.loads((self.folder_of(step) / LOG).read_text())

    def restore(self, folder: str) -> None:
        """Load weights, optimiser and learning rate. Trainer calls it when the optimiser exists."""
        import torch

        trainer: Any = self._trainer
        read_shards(trainer, Path(folder))
        of_rank, device = torch.load(Path(folder) / self._rank_file, weights_only=True), trainer.args.device
        for name in ("window", "first_pass"):
            counts = {key: tensor.to(device) for key, tensor in of_rank[name].items()}
            setattr(trainer, name, type(trainer.window)(**counts))
        trainer.lr_scheduler.load_state_dict(of_rank["scheduler"])


def write_shards(trainer: Any, folder: Path) -> None:
    """Save the weights that are trained and their optimiser's states. A collective: every rank calls it."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # The writer flushes every file to disk (`sync_files`).
    with _without_warnings():
        save(_shards(trainer), storage_writer=FileSystemWriter(folder), no_dist=trainer.args.world_size == 1)


def read_shards(trainer: Any, folder: Path) -> None:
    """Load what `write_shards` saved. A collective: every rank calls it."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    model, optimizer = _model_and_optimizer(trainer)
    state = _shards(trainer)
    with _without_warnings():
        load(state, storage_reader=FileSystemReader(folder), no_dist=trainer.args.world_size == 1)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_state_dict(
        model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["optimizer"], options=options
    )


def _shards(trainer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model, optimizer = _model_and_optimizer(trainer)
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))
    return {"weights": weights, "optimizer": states}


def _model_and_optimizer(trainer: Any) -> tuple[Any, Any]:
    """Return the model and PyTorch's own optimiser under accelerate's wrapper."""
    return trainer.model, getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def _as_tensors(tally: Any) -> dict[str, Any]:
    import torch

    return {name: torch.as_tensor(value).cpu() for name, value in vars(tally).items()}


def _step(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _of_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank: their clocks and views of a folder differ."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]
