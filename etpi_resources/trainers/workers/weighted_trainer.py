"""TRL's SFTTrainer with weighted labels, the batches and learning rates of a plan, and counts of what it trained on.

The loss of a micro-batch is sum(w * nll) / step_weight, natural logarithm, with step_weight constant over the run (see
`plan`): micro-batches add up to the step's loss, and steps to the full-dataset function sum(w * nll) / sum(w).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import TrainerCallback
from trl.trainer.sft_trainer import SFTTrainer

from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.trainers.contracts import SftLogLine
from etpi_resources.trainers.workers.collate import Sequences, collate
from etpi_resources.trainers.workers.plan import MicroBatch, Plan, make_pass
from etpi_resources.trainers.workers.replicas import ThreadReplicas
from etpi_resources.trainers.workers.sharding import batches_of_rank, reshard, sum_replicated_gradients, without_labels
from etpi_resources.trainers.workers.tree_attention import tree_arguments

if TYPE_CHECKING:
    from etpi_resources.trainers.workers.states import States


def nll_at_labels(model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the losses of labels with a model that has a label head; `inputs` are those of `collate`.

    Returns:
        Negative log-likelihoods, (B, P) float32, 0 for the label -100; the number of labels that the model ranks first,
        a scalar.
    """
    trees = tree_arguments(inputs["layout"], inputs["position_ids"]) if "layout" in inputs else {}
    nll, hits = model(
        input_ids=inputs["input_ids"],
        label_positions=inputs["positions"],
        labels=inputs["labels"],
        use_cache=False,
        **trees,
    )
    return nll, hits.sum()


def weighted_nll(model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sum(w * nll) of a micro-batch and the number of labels that the model ranks first, both scalars."""
    nll, hits = nll_at_labels(model, inputs)
    return (nll * inputs["weights"]).sum(), hits


class Batches(Dataset):
    """Micro-batches as tensors; `order` is the position of each in `batches`.

    Args:
        items: positions of the micro-batches of each item; None is a micro-batch without labels (see
            `sharding.batches_of_rank`).
    """

    def __init__(
        self, batches: Sequence[MicroBatch], items: Sequence[Sequence[int | None]], sequences: Sequences, pad_id: int
    ) -> None:
        self.batches, self.items, self.sequences, self.pad_id = batches, items, sequences, pad_id

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        return [self._tensors(position) for position in self.items[index]]

    def _tensors(self, position: int | None) -> dict[str, Any]:
        if position is None:
            smallest = min(self.batches, key=lambda batch: batch.tokens)
            return without_labels(collate(smallest, self.sequences, self.pad_id)) | {"order": 0}
        return collate(self.batches[position], self.sequences, self.pad_id) | {"order": position}


@dataclass
class Tally:
    """Counts of what entered the loss, kept on the device so that counting does not stall it."""

    nll: torch.Tensor | float = 0.0
    weight: torch.Tensor | float = 0.0
    labels: torch.Tensor | int = 0
    hits: torch.Tensor | int = 0
    tokens: torch.Tensor | int = 0
    repeated: torch.Tensor | int = 0

    def add(self, nll: torch.Tensor, hits: torch.Tensor, inputs: dict[str, Any]) -> None:
        self.nll = self.nll + nll.detach()
        self.hits = self.hits + hits
        self.weight = self.weight + inputs["weights"].sum(dtype=torch.float64)
        self.labels = self.labels + (inputs["labels"] != IGNORE_INDEX).sum()
        self.tokens = self.tokens + inputs["tokens"]
        self.repeated = self.repeated + inputs["repeated"]

    def loss(self) -> float:
        """Return sum(w * nll) / sum(w)."""
        return float(self.nll) / float(self.weight)

    def accuracy(self) -> float | None:
        """Return the unweighted share of labels that the model ranks first, TRL's mean_token_accuracy, or None."""
        return float(self.hits) / float(self.labels) if float(self.labels) else None


class WeightedSFTTrainer(SFTTrainer):
    """SFTTrainer over a plan of weighted, pre-tokenised sequences.

    Several processes divide the micro-batches of each step (see `sharding`).

    Args:
        replicated: one call of `training_step` gets all micro-batches of a step and runs them in threads (see
            `replicas`), so gradient accumulation has to be 1.

    Attributes:
        states: saves and restores what a killed run continues from. resumed_at: steps that were done before.
    """

    # The loss is divided by the weight of a whole optimiser step, so accumulation must not divide it again.
    loss_is_scaled_for_ga = True

    def __init__(self, *, plan: Plan, sequences: Sequences, pad_id: int, replicated: bool, **arguments: Any) -> None:
        self.plan, self.sequences, self.pad_id = plan, sequences, pad_id
        self.window = Tally()
        self.first_pass = Tally()
        self._replicated = replicated
        self.states: States | None = None
        self.resumed_at = 0
        self._generators: str | None = None
        super().__init__(**arguments)

    def get_train_dataloader(self) -> DataLoader:
        # batch_size None: the plan's micro-batches are the batches. Collating one takes about a millisecond, less than
        # handing it over from a data loader process.
        batches, accumulate = self.plan.batches, self.plan.accumulate
        if self._replicated:
            positions = range(len(batches))
            steps = [positions[i : i + accumulate] for i in positions[::accumulate]]
            left = steps[self.resumed_at :]
            return DataLoader(Batches(batches, left, self.sequences, self.pad_id), batch_size=None)
        of_rank = self._of_rank(batches, accumulate, self.sequences)
        of_rank.items = of_rank.items[self.resumed_at * self.args.gradient_accumulation_steps :]
        return DataLoader(of_rank, batch_size=None)

    def _of_rank(self, batches: Sequence[MicroBatch], accumulate: int, sequences: Sequences) -> Batches:
        """Return the micro-batches of this process, one per item."""
        positions = batches_of_rank(batches, accumulate, self.args.process_index, self.args.world_size)
        return Batches(batches, [[position] for position in positions], sequences, self.pad_id)

    @cached_property
    def _replicas(self) -> ThreadReplicas:
        # Created at the first step, when Trainer has finished preparing the model.
        return ThreadReplicas(self.model_wrapped)

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute the gradients of the micro-batches `inputs`; return their loss."""
        if self._generators is not None:
            super()._load_rng_state(self._generators)
            self._generators = None
        if not self._replicated:
            (batch,) = inputs
            loss = super().training_step(model, batch, num_items_in_batch)
            if self.args.world_size > 1 and self.accelerator.sync_gradients:
                sum_replicated_gradients(model)
            return loss
        model.train()
        losses = []
        for batch, (weighted, hits) in zip(inputs, self._replicas.backward(inputs, self._backward), strict=True):
            losses.append(self._counted(weighted, hits, batch))
        return torch.stack(losses).sum()

    def _backward(self, model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        weighted, hits = weighted_nll(model, inputs)
        (weighted / self.plan.step_weight).backward()
        return weighted.detach(), hits

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return sum(w * nll) / step_weight of one micro-batch."""
        return self._counted(*weighted_nll(model, inputs), inputs)

    def _counted(self, weighted: torch.Tensor, hits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Count one micro-batch; return its share of the step's loss."""
        self.window.add(weighted, hits, inputs)
        if inputs["order"] < self.plan.pass_batches:
            self.first_pass.add(weighted, hits, inputs)
        return weighted / self.plan.step_weight

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        # Trainer advances the scheduler once more after the last step.
        learning_rates = [*self.plan.learning_rates.tolist(), self.plan.learning_rates[-1].item()]
        scheduled: Any = optimizer or self.optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: learning_rates[step])
        self._created_lr_scheduler = True
        return self.lr_scheduler

    # What a run continues from is in `states`, not in Trainer's files.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        return

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.states is not None:
            self.states.restore(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # The data loader draws a number when it starts, so the generators are set after that.
        self._generators = checkpoint

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    def validation_loss(self, sequences: Sequences, micro_tokens: int) -> float:
        """Return sum(w * nll) / sum(w) over all of `sequences`, without dropout or gradients."""
        lengths = sequences.lengths().tolist()
        batches = make_pass(lengths, micro_tokens, np.random.default_rng(0), packed=self.plan.packed)
        tally = Tally()
        model: Any = self.model_wrapped
        model.eval()
        with torch.no_grad():
            # A DataLoader would advance the random generator, and validation must not change the training.
            of_rank = self._of_rank(batches, len(batches), sequences)
            for (batch,) in map(of_rank.__getitem__, range(len(of_rank))):
                inputs = self._prepare_inputs(batch)
                tally.add(*weighted_nll(model, inputs), inputs)
        model.train()
        reshard(model)
        return self.sum_over_ranks(tally).loss()

    def sum_over_ranks(self, tally: Tally) -> Tally:
        """Return the sum of the counts of all processes. Every rank has to call it."""
        counted = torch.tensor([float(x) for x in vars(tally).values()], dtype=torch.float64, device=self.args.device)
        summed: Any = self.accelerator.reduce(counted)
        return Tally(*summed.tolist())


class StepLog(TrainerCallback):
    """Write lines of `metrics.jsonl` (SftLogLine), and call `on_step` after each step.

    The validation loss is measured before the first step, at the end of each epoch and after the last step.

    Args:
        every: steps between lines; the first step and the ends of epochs always have a line.
        on_step: (steps done, note for the display).
    """

    def __init__(
        self,
        path: Path,
        trainer: WeightedSFTTrainer,
        validation: Sequences | None,
        micro_tokens: int,
        *,
        every: int,
        on_step: Callable[[int, str], None],
    ) -> None:
        self.path, self.trainer, self.validation, self.micro_tokens = path, trainer, validation, micro_tokens
        self.every, self.on_step = every, on_step
        self.lines: list[SftLogLine] = []
        self.tokens = 0
        self._seconds_before = 0.0
        self.start = time.monotonic()

    def state(self) -> dict[str, Any]:
        """Return what a run that continues from here needs of the log, as JSON."""
        lines = [line.model_dump() for line in self.lines]
        return {"lines": lines, "tokens": self.tokens, "seconds": time.monotonic() - self.start}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the log of an earlier run; called before training."""
        self.lines = [SftLogLine.model_validate(line) for line in state["lines"]]
        self.tokens, self._seconds_before = state["tokens"], state["seconds"]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.monotonic() - self._seconds_before
        if self.trainer.is_world_process_zero():
            self.path.write_text("".join(json.dumps(line.model_dump()) + "\n" for line in self.lines))
        if not self.lines:
            self._write(step=0, epoch=0.0, val_loss=self._validate())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        plan, step = self.trainer.plan, state.global_step
        epoch = float(plan.consumed[step - 1])
        before = float(plan.consumed[step - 2]) if step > 1 else 0.0
        last = step == plan.steps
        ends_epoch = last or int(epoch + 1e-9) > int(before + 1e-9)
        if last or ends_epoch or step == 1 or step % self.every == 0:
            window, self.trainer.window = self.trainer.sum_over_ranks(self.trainer.window), Tally()
            self.tokens += int(window.tokens)
            learning_rate = args.learning_rate * float(plan.learning_rates[step - 1])
            loss = window.loss()
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the loss is {loss} at step {step} of {plan.steps}; lower train.learning_rate, lengthen "
                    "train.warmup_ratio, or train in fp32"
                )
            self._write(
                step=step,
                epoch=epoch,
                loss=loss,
                token_accuracy=window.accuracy(),
                val_loss=self._validate() if ends_epoch else None,
                learning_rate=learning_rate,
            )
        self.on_step(step, f"loss {self.lines[-1].loss:.3f}")

    def _validate(self) -> float | None:
        if self.validation is None:
            return None
        return self.trainer.validation_loss(self.validation, self.micro_tokens)

    def _write(self, **figures: Any) -> None:
        line = SftLogLine(**figures, tokens=self.tokens, seconds=time.monotonic() - self.start)
        self.lines.append(line)
        if self.trainer.is_world_process_zero():
            with self.path.open("a") as file:
                file.write(json.dumps(line.model_dump()) + "\n")
        if self.trainer.args.report_to:
            self.trainer.log(_as_trl_names(line))


def _as_trl_names(line: SftLogLine) -> dict[str, float]:
    """Return a line's figures under the names by which trackers know them."""
    named = {
        "loss": line.loss,
        "mean_token_accuracy": line.token_accuracy,
        "eval_loss": line.val_loss,
        "learning_rate": line.learning_rate,
        "num_tokens": line.tokens,
    }
    return {name: value for name, value in named.items() if value is not None}
