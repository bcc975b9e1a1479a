"""Supervised fine-tuning of one model on merged, weighted sequences with TRL, full or LoRA.

With `train.shards` above 1 this program runs in as many processes (see `ranks`), each with a share of the model and of
every step; rank 0 logs, writes and proves the checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from etpi_resources.trainers.contracts import (
    FirstPass,
    PhaseSeconds,
    PlanSummary,
    SftSettings,
    SftWorkerConfig,
    SftWorkerResult,
)
from etpi_resources.trainers.workers.reporting import Worker, open_worker
from etpi_resources.trainers.workers.tracking import UNTRACKED, survive_trackers, tracking_arguments

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
    from trl.trainer.sft_config import SFTConfig

    from etpi_resources.trainers.workers.collate import Sequences
    from etpi_resources.trainers.workers.device import Compute
    from etpi_resources.trainers.workers.plan import Plan
    from etpi_resources.trainers.workers.states import States
    from etpi_resources.trainers.workers.weighted_trainer import StepLog, WeightedSFTTrainer

MODULE = "etpi_resources.trainers.workers.sft_worker"
GRADIENT_NORM = 1.0
PINNED: Mapping[str, Any] = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "neftune_noise_alpha": None}
"""As `grpo_worker.PINNED`; loss, rows, batches and learning rates are the plan's."""
CHECK_TOKENS = 128
LOG_LINES = 100
MAX_PADDING = 0.15
"""Share of padding up to which sequences without branches are one row each, in the fused causal kernels.

On a CPU these train as fast as packed rows, without a kernel for every length of a packed row (1.1 GB instead of 2.6).
"""


@dataclass(frozen=True)
class Layout:
    """The rows of training, and their batches.

    Attributes:
        sequences: the sequences in the rows: the stored ones, or their branches.
        plan: the batches.
        name, because: the layout and the reason for it; see `contracts.PlanSummary`.
    """

    sequences: Sequences
    plan: Plan
    name: Literal["rows", "trees", "branches"]
    because: str


def run(worker: Worker[SftWorkerConfig]) -> SftWorkerResult | None:
    """Load, lay out, train, prove what was saved. None on every rank but 0.

    Raises:
        RuntimeError: the config requires a GPU and this interpreter's torch sees none.
        BadSequences, ValueError: the sequences cannot be trained on; the message says why.
    """
    began = time.monotonic()
    # Before TRL is imported, which imports trackio, which reads its folder from the environment then.
    tracking = tracking_arguments(worker)
    from transformers.utils import logging as transformers_logging

    from etpi_resources.trainers.workers import proof
    from etpi_resources.trainers.workers.device import choose_compute, device_name, libraries
    from etpi_resources.trainers.workers.layer_kernels import fused_layers
    from etpi_resources.trainers.workers.sharding import gathered, load_start
    from etpi_resources.trainers.workers.states import States

    transformers_logging.disable_progress_bar()
    config = worker.config
    shards = config.train.shards
    compute = choose_compute(worker, config.device, config.train.dtype)
    fused = uses_liger(worker, compute, "layer_kernels")
    stored, validation = read_splits(config)
    lora = config.train.method == "lora"
    model = load_start(config.base, shards, compute, lora=lora)
    replicated = can_replicate(config.train, compute, model)
    micro_tokens = pass_tokens(config, replicated)
    layout = lay_out(stored, config, micro_tokens, model)
    if compute.gpu and layout.name == "trees":
        layout = replace(layout, sequences=layout.sequences.longest_first())
    trainer = build_trainer(
        worker, model, layout.plan, layout.sequences, compute=compute, replicated=replicated, tracking=tracking
    )
    device = f"{shards} x {device_name(compute.gpu)}" if shards > 1 else device_name(compute.gpu)
    worker.log(
        f"{config.label}: {len(stored)} sequences, {layout.plan.steps} steps of up to {config.train.batch_tokens} "
        f"tokens, {config.train.method} fine-tuning in {compute.dtype} on {device}; {layout.because}"
    )
    saver = CheckpointSaver(worker, trainer, layout.plan)
    validation = validation if layout.name == "trees" else validation.branches()
    states = States(worker.folder, trainer, config.state_seconds)
    log = add_log(worker, trainer, saver, states, validation, micro_tokens)
    started = time.monotonic()
    kernels = fused_layers(model, required=config.train.layer_kernels == "liger") if fused else nullcontext(False)
    with kernels as by_liger:
        used_libraries = libraries("liger_kernel") if by_liger else libraries()
        trainer.train(resume_from_checkpoint=continue_from(worker, states, log))
    trained = time.monotonic()
    counted = first_pass(trainer, layout.sequences)
    whole = gathered(trainer, config.base, config.train if lora else None)
    if whole is None:
        return None
    used = layout.plan.final_step(config.train.use_step, config.train.use_epoch)
    saved = proof.finish(config, whole, lora, saver.folders, used, check_ids(layout.sequences))
    return SftWorkerResult(
        checkpoints=proof.entries(saver.folders, used, lora, log.lines),
        log=tuple(log.lines),
        counted=counted,
        saved=saved,
        plan=summary(stored, layout),
        seconds=PhaseSeconds(start=started - began, train=trained - started, save=time.monotonic() - trained),
        device=device,
        dtype=compute.dtype,
        libraries=used_libraries,
    )


# --- loading ---------------------------------------------------------------------------------------------------------


def read_splits(config: SftWorkerConfig) -> tuple[Sequences, Sequences]:
    """Return (training sequences, validation sequences), checked against the base model's limits."""
    from transformers import AutoConfig

    from etpi_resources.trainers.workers.collate import read_sequences

    text = AutoConfig.from_pretrained(config.base, local_files_only=True).get_text_config()
    limits = {"vocabulary": text.vocab_size, "longest": text.max_position_embeddings}
    return read_sequences(config.files, "train", **limits), read_sequences(config.files, "val", **limits)


def can_replicate(train: SftSettings, compute: Compute, model: PreTrainedModel) -> bool:
    """Return whether the micro-batches of a step run at the same time (see `replicas`): on a CPU, without dropout."""
    from etpi_resources.trainers.workers.replicas import uses_dropout

    dropout = train.method == "lora" and train.lora_dropout
    return train.shards == 1 and not compute.gpu and not dropout and not uses_dropout(model)


def pass_tokens(config: SftWorkerConfig, replicated: bool) -> int:
    """Return the tokens of one forward pass: as configured, but at most a replica's or shard's part of a step."""
    from etpi_resources.trainers.workers.replicas import REPLICAS

    train = config.train
    return min(config.micro_tokens, -(-train.batch_tokens // (REPLICAS if replicated else train.shards)))


# --- preparing -------------------------------------------------------------------------------------------------------


def lay_out(stored: Sequences, config: SftWorkerConfig, micro_tokens: int, model: PreTrainedModel) -> Layout:
    """Choose the rows to train on.

    Sequences that do not fork are a row each where that pads little. Otherwise they are packed as trees, if the model
    can be trained on those; if it cannot, each branch is a row.
    """
    from etpi_resources.trainers.workers.tree_attention import refuses_trees

    if stored.fork:
        if refusal := refuses_trees(model):
            branches = stored.branches()
            plan = plan_batches(config, branches, micro_tokens, packed=False)
            return Layout(branches, plan, "branches", f"the model cannot be trained on trees: {refusal}")
        return Layout(stored, plan_batches(config, stored, micro_tokens, packed=True), "trees", "sequences fork")
    rows = plan_batches(config, stored, micro_tokens, packed=False)
    padding = rows.padding(stored.lengths())
    if padding <= MAX_PADDING:
        return Layout(stored, rows, "rows", f"nothing forks and {padding:.1%} of a row each is padding")
    packed = plan_batches(config, stored, micro_tokens, packed=True)
    gain = f"{padding:.1%} of a row each would be padding, {packed.padding(stored.lengths()):.1%} packed"
    if packed.padding(stored.lengths()) >= padding:
        return Layout(stored, rows, "rows", f"nothing forks, {gain}")
    if refusal := refuses_trees(model):
        return Layout(
            stored, rows, "rows", f"nothing forks, {gain}, but the model cannot be trained on packed rows: {refusal}"
        )
    return Layout(stored, packed, "trees", gain)


def plan_batches(config: SftWorkerConfig, sequences: Sequences, micro_tokens: int, *, packed: bool) -> Plan:
    """Return the plan of a run over these sequences."""
    from etpi_resources.trainers.workers.plan import PlanSettings, make_plan

    train = config.train
    settings = PlanSettings(
        epochs=train.epochs,
        max_steps=train.max_steps,
        batch_tokens=train.batch_tokens,
        micro_tokens=micro_tokens,
        batch_sequences=train.batch_sequences,
        schedule=train.schedule,
        warmup=train.warmup_ratio,
        seed=config.seed,
        packed=packed,
    )
    weights = sequences.totals(sequences.weights).tolist()
    plan = make_plan(sequences.lengths().tolist(), sequences.rows.tolist(), weights, settings)
    return plan.until(plan.final_step(train.use_step, train.use_epoch)) if train.stop_at_used else plan


def build_trainer(
    worker: Worker[SftWorkerConfig],
    model: PreTrainedModel,
    plan: Plan,
    sequences: Sequences,
    *,
    compute: Compute,
    replicated: bool,
    tracking: Mapping[str, Any] = UNTRACKED,
) -> WeightedSFTTrainer:
    """Return the trainer of a plan; `replicated`: the micro-batches of a step run at the same time (see `replicas`)."""
    import datasets

    from etpi_resources.chat.tokenizer_files import pad_id, read_tokenizer
    from etpi_resources.cuda import avoid_cudnn_attention
    from etpi_resources.trainers.workers.checkpointing import lora_config
    from etpi_resources.trainers.workers.device import narrow_hidden_states
    from etpi_resources.trainers.workers.label_head import add_label_head
    from etpi_resources.trainers.workers.sharding import add_replicated_adapter, reshard
    from etpi_resources.trainers.workers.weighted_trainer import WeightedSFTTrainer

    avoid_cudnn_attention()  # rows and branches have many lengths
    add_label_head(model, liger=uses_liger(worker, compute, "loss_kernel"))
    narrow_hidden_states(model)
    reshard(model)  # or tensors that its passes gathered would be frozen and optimised in place of the shards
    config, train = worker.config, worker.config.train
    lora = train.method == "lora"
    if lora and train.shards > 1:
        add_replicated_adapter(model, train, config.seed)
    tokenizer = read_tokenizer(Path(config.base))
    passes = -(-plan.accumulate // train.shards)
    trainer = WeightedSFTTrainer(
        plan=plan,
        sequences=sequences,
        pad_id=pad_id(tokenizer),
        replicated=replicated,
        model=model,
        args=sft_arguments(
            train,
            worker.folder / "trl",
            steps=plan.steps,
            accumulate=1 if replicated else passes,
            seed=config.seed,
            compute=compute,
            tracking=tracking,
        ),
        train_dataset=datasets.Dataset(sequences.table()),
        data_collator=lambda batch: batch,
        processing_class=tokenizer,
        peft_config=lora_config(train) if lora and train.shards == 1 else None,
    )
    survive_trackers(trainer, worker.log)
    return trainer


def uses_liger(
    worker: Worker[SftWorkerConfig], compute: Compute, option: Literal["loss_kernel", "layer_kernels"]
) -> bool:
    """Return whether Liger computes what `train.<option>` names; logs where the spec asks for it and there is no GPU.

    Raises:
        RuntimeError: it is not installed.
    """
    from etpi_resources.cuda import triton_runs

    chosen = getattr(worker.config.train, option)
    if chosen == "auto":
        # Over shards Liger's kernels were not run yet.
        there = compute.gpu and worker.config.train.shards == 1 and find_spec("liger_kernel") is not None
        return there and triton_runs()
    if chosen != "liger":
        return False
    if not compute.gpu:
        worker.log(f'{worker.config.label}: train.{option} = "liger" needs a GPU; a CPU computes the same without it')
        return False
    if find_spec("liger_kernel") is None:
        raise RuntimeError(
            f'train.{option} = "liger" needs liger-kernel in the interpreter that trains: pip install "etpi[gpu]"'
        )
    return True


def sft_arguments(
    train: SftSettings,
    folder: Path,
    *,
    steps: int,
    accumulate: int,
    seed: int,
    compute: Compute,
    tracking: Mapping[str, Any] = UNTRACKED,
) -> SFTConfig:
    """TRL's arguments for a train section."""
    from trl.trainer.sft_config import SFTConfig

    return SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        gradient_accumulation_steps=accumulate,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        max_grad_norm=GRADIENT_NORM,
        optim=train.optimizer,
        bf16=compute.dtype == "bf16",
        use_cpu=not compute.gpu,
        gradient_checkpointing=train.gradient_checkpointing,
        seed=seed,
        # The sequences are already tokens with labels, so the trainer must not prepare, cut or pack anything.
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=False,
        # A run that continues gets the remaining batches from the plan.
        ignore_data_skip=True,
        completion_only_loss=False,
        remove_unused_columns=False,
        # StepLog and CheckpointSaver log, evaluate and save; the trainer's own would delay each step.
        save_strategy="no",
        logging_strategy="no",
        eval_strategy="no",
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        **PINNED,
        **tracking,
    )


# --- training --------------------------------------------------------------------------------------------------------


class CheckpointSaver:
    """Saves the steps that the config names."""

    def __init__(self, worker: Worker[SftWorkerConfig], trainer: WeightedSFTTrainer, plan: Plan) -> None:
        self._worker, self._trainer, self._plan = worker, trainer, plan
        train = worker.config.train
        self._every = train.save_steps
        self._final = plan.final_step(train.use_step, train.use_epoch)

    @property
    def folders(self) -> dict[int, Path]:
        """Return step -> folder of each step that is kept, in order; a run that continues has the earlier ones."""
        kept = filter(self._keeps, range(1, self._plan.steps + 1))
        return {step: self._worker.folder / f"step-{step}" for step in kept}

    def save(self, step: int) -> None:
        """Save this step if it is to be kept. A collective: every rank calls it."""
        from etpi_resources.trainers.workers import proof
        from etpi_resources.trainers.workers.sharding import gathered

        if not self._keeps(step):
            return
        config, folder = self._worker.config, self.folders[step]
        lora = config.train.method == "lora"
        if whole := gathered(self._trainer, config.base, config.train if lora else None):
            proof.save_step(config, whole, lora, folder)

    def _keeps(self, step: int) -> bool:
        return step in (self._final, self._plan.steps) or bool(self._every and step % self._every == 0)


def add_log(
    worker: Worker[SftWorkerConfig],
    trainer: WeightedSFTTrainer,
    saver: CheckpointSaver,
    states: States,
    validation: Sequences,
    micro_tokens: int,
) -> StepLog:
    """Have the trainer log, report progress and save; returns the log that it fills."""
    from transformers import PrinterCallback

    from etpi_resources.trainers.workers.weighted_trainer import StepLog

    stage = worker.stage(f"seed {worker.config.seed}, step", trainer.plan.steps)

    def on_step(step: int, note: str) -> None:
        stage.advance(step - stage.done, note=note)
        saver.save(step)
        states.save_if_due(step, log)

    log = StepLog(
        worker.folder / "metrics.jsonl",
        trainer,
        validation if len(validation) else None,
        micro_tokens,
        every=max(1, trainer.plan.steps // LOG_LINES),
        on_step=on_step,
    )
    trainer.add_callback(log)
    trainer.remove_callback(PrinterCallback)
    return log


def continue_from(worker: Worker[SftWorkerConfig], states: States, log: StepLog) -> str | None:
    """Return the folder of the state that the run continues from, if there is one. Every rank has to call it."""
    step = states.newest(worker.log)
    if step is None:
        return None
    log.restore(states.log_of(step))
    worker.log(f"{worker.config.label}: continuing from step {step} of {log.trainer.plan.steps}")
    return str(states.folder_of(step))


# --- reporting -------------------------------------------------------------------------------------------------------


def first_pass(trainer: WeightedSFTTrainer, sequences: Sequences) -> FirstPass:
    """Return the counts of the first pass and those of the plan. Every rank has to call it."""
    import numpy as np

    plan, tally = trainer.plan, trainer.sum_over_ranks(trainer.first_pass)
    fed = [s for batch in plan.batches[: plan.pass_batches] for s in batch.sequences]
    return FirstPass(
        complete=len(fed) == len(sequences),
        labels=int(tally.labels),
        labels_planned=int(sequences.totals(sequences.labels >= 0)[fed].sum()),
        # A token that several branches share is one token of the dataset.
        tokens=int(tally.tokens - tally.repeated),
        tokens_planned=int(np.sum((sequences.lengths() - sequences.repeated)[fed])),
        weights=float(tally.weight),
        weights_planned=float(sequences.totals(sequences.weights)[fed].sum()),
    )


def check_ids(sequences: Sequences) -> torch.Tensor:
    """Ids (1, L) of the first sequence, on which logits are compared."""
    import torch

    return torch.from_numpy(sequences.ids[: min(CHECK_TOKENS, sequences.offsets[1])].astype("int64"))[None]


def summary(stored: Sequences, layout: Layout) -> PlanSummary:
    """Return the plan of a run as it is reported."""
    plan, sequences = layout.plan, layout.sequences
    leaves = sum(tree.leaves for tree in stored.trees)
    return PlanSummary(
        steps=plan.steps,
        sequences=len(stored),
        epochs=float(plan.consumed[-1]),
        weighted_rows=float(sequences.rows.sum()),
        padding=plan.padding(sequences.lengths()),
        shapes=tuple(sorted({(1 if b.packed else len(b.sequences), b.length) for b in plan.batches})),
        layout=layout.name,
        branches=len(sequences) if layout.name == "branches" else leaves,
        layout_because=layout.because,
        step_weight=plan.step_weight,
        accumulate=plan.accumulate,
    )


def main() -> None:
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    with open_worker(SftWorkerConfig) as worker:
        # `record` leaves the reason of a failure to the launcher of several processes.
        result = record(run)(worker)
        if dist.is_initialized():
            dist.destroy_process_group()
        if result is not None:
            worker.finish(result)


if __name__ == "__main__":
    main()
