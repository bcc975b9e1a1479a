"""Supervised fine-tuning of one model on merged, weighted sequences with TRL, full or LoRA.

Belongs here: one training run, from configuration to saved checkpoints and the figures its checks need. Does not belong
here: what to train on what (the recipe), the loss (`weighted_trainer`), files (`checkpointing`).

Configuration (`config.json`): `label` (what the lines are headed), `base` (folder), `base_name` (how adapters name it),
`files` (parquet files of sequences), `seed`, `chat_template` (text or null), `device` ("auto" or "cuda"),
`micro_tokens` (tokens of one forward pass), `train` (the spec's train section). Result: see `run`.

With `train.shards` above 1 this program runs in as many processes (see `ranks`), each with a share of the model and of
every step; the first of them speaks, writes and proves what was saved.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from etpi_resources.trainers.workers.reporting import Worker, open_worker

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel
    from trl.trainer.sft_config import SFTConfig

    from etpi_resources.trainers.workers.collate import Sequences
    from etpi_resources.trainers.workers.plan import Plan
    from etpi_resources.trainers.workers.precision import Dtype
    from etpi_resources.trainers.workers.weighted_trainer import Log, WeightedSFTTrainer

MODULE = "etpi_resources.trainers.workers.sft_worker"
GRADIENT_NORM = 1.0
CHECK_TOKENS = 128
LOG_LINES = 100
PADDING_BORNE = 0.15
"""Share of padding up to which sequences that do not fork stay a row each, in the fused causal kernels: on a CPU those
train as fast, and keep no kernel for every length that a packed row brings (a process of 1.1 GB and not of 2.6)."""


def run(worker: Worker) -> dict[str, Any]:
    """Train, save, read back.

    Returns:
        `checkpoints`: [{step, final, folder, adapter (folder or null), train_loss, token_accuracy, val_loss}], folders
        relative to the worker's. `log`: the lines of metrics.jsonl. `counted`: what entered the loss in the first pass
        (or in all there was): {complete, labels, labels_planned, tokens, tokens_planned}. `saved`, of the last
        checkpoint: {dtype, base_difference (of logits, relative), differing (tensors that read back otherwise),
        reload_difference (of logits, relative)}, and for full fine-tuning {unchanged (names), trained (count)}, for
        LoRA {zero_adapters (names), adapters (count), merge_difference}. `plan`: {steps, sequences, epochs,
        weighted_rows, padding, shapes, step_weight, accumulate, layout, branches, layout_because}; the layout is "rows"
        (a sequence each), "trees" (packed) or "branches" (a row each, where the model cannot be trained on trees).
        `seconds`: {start, train, save}. `device`. `dtype`: what was computed in, "bf16" or "fp32".

    Raises:
        RuntimeError: a GPU is asked for and this interpreter's torch sees none.
        BadSequences, ValueError: the sequences cannot be trained on; the message says why.
    """
    began = time.monotonic()
    config, train = worker.config, worker.config["train"]
    import torch
    from transformers import AutoConfig, PrinterCallback
    from transformers.utils import logging as transformers_logging

    from etpi_resources.trainers.workers import proof
    from etpi_resources.trainers.workers.collate import read_sequences
    from etpi_resources.trainers.workers.device import device_name, libraries, use_dtype, use_gpu
    from etpi_resources.trainers.workers.twins import PARTS, draws
    from etpi_resources.trainers.workers.weighted_trainer import Log

    transformers_logging.disable_progress_bar()
    shards = train.get("shards", 1)
    gpu = use_gpu(config["device"])
    dtype = use_dtype(worker, train["dtype"], gpu)
    text = AutoConfig.from_pretrained(config["base"], local_files_only=True).get_text_config()
    limits = {"vocabulary": text.vocab_size, "longest": text.max_position_embeddings}
    stored = read_sequences(config["files"], "train", **limits)
    validation = read_sequences(config["files"], "val", **limits)
    lora = train["method"] == "lora"
    model = load(config, gpu, dtype)
    at_once = shards == 1 and not gpu and not (lora and train["lora_dropout"]) and not draws(model)
    micro_tokens = min(config["micro_tokens"], -(-train["batch_tokens"] // (PARTS if at_once else shards)))
    sequences, plan, layout, because = lay_out(stored, config, micro_tokens, model)
    validation = validation.branches() if layout == "branches" else validation
    trainer = build_trainer(worker, model, plan, sequences, gpu=gpu, dtype=dtype, at_once=at_once)
    device = f"{shards} x {device_name(gpu)}" if shards > 1 else device_name(gpu)
    used_libraries = libraries()
    worker.say(
        f"{config['label']}: {len(stored)} sequences, {plan.steps} steps of up to {train['batch_tokens']} tokens, "
        f"{train['method']} fine-tuning in {dtype} on {device}; {because}"
    )
    stage = worker.stage(f"seed {config['seed']}, step", plan.steps)
    saved_steps: list[int] = []
    used = plan.step_after(train["use_epoch"]) if train.get("use_epoch") else plan.steps

    def on_step(step: int, note: str) -> None:
        stage.advance(note=note)
        if step in (used, plan.steps) or (train["save_steps"] and step % train["save_steps"] == 0):
            if held := whole(config, trainer):
                proof.save_step(config, held, lora, _folder(worker, step))
            saved_steps.append(step)

    every = max(1, plan.steps // LOG_LINES)
    log = Log(
        worker.folder / "metrics.jsonl", trainer, validation if len(validation) else None, micro_tokens, every, on_step
    )
    trainer.add_callback(log)
    trainer.remove_callback(PrinterCallback)
    started = time.monotonic()
    trainer.train()
    trained = time.monotonic()
    ids = torch.from_numpy(sequences.ids[: min(CHECK_TOKENS, sequences.offsets[1])].astype("int64"))[None]
    counted, held = _counted(trainer, sequences), whole(config, trainer)
    folders = {step: _folder(worker, step) for step in saved_steps}
    saved = proof.finish(config, held, lora, folders, ids) if held else {}
    ended = time.monotonic()
    return {
        "checkpoints": [_entry(step, step == used, log, lora) for step in saved_steps],
        "log": log.lines,
        "counted": counted,
        "saved": saved,
        "plan": {
            "steps": plan.steps,
            "sequences": len(stored),
            "epochs": float(plan.consumed[-1]),
            "weighted_rows": float(sequences.rows.sum()),
            "padding": plan.padding(sequences.lengths()),
            "shapes": sorted({(1 if b.packed else len(b.sequences), b.length) for b in plan.batches}),
            "layout": layout,
            "branches": len(sequences) if layout == "branches" else sum(t.leaves for t in stored.trees),
            "layout_because": because,
            "step_weight": plan.step_weight,
            "accumulate": plan.accumulate,
        },
        "seconds": {"start": started - began, "train": trained - started, "save": ended - trained},
        "device": device,
        "dtype": dtype,
        "libraries": used_libraries,
    }


def load(config: Mapping[str, Any], gpu: bool, dtype: Dtype) -> PreTrainedModel:
    """The base, or this process's share of it. Weights that are trained are kept in float32; a frozen base may stay as
    small as it is stored."""
    import torch

    from etpi_resources.trainers.workers.checkpointing import load_model, stored_dtype
    from etpi_resources.trainers.workers.sharding import load_sharded

    base, train = config["base"], config["train"]
    if train.get("shards", 1) > 1:
        return load_sharded(base, train["shards"], gpu=gpu, bf16=dtype == "bf16")
    return load_model(base, stored_dtype(base) if train["method"] == "lora" and gpu else torch.float32)


def whole(config: Mapping[str, Any], trainer: WeightedSFTTrainer) -> Any:
    """The trainer as `proof` wants it, its model in one piece. Of several processes, which all must ask, the first
    alone has it; None in the others."""
    from etpi_resources.trainers.workers import sharding

    if trainer.args.world_size == 1:
        return trainer
    sharded: Any = trainer.model
    model = sharding.whole(sharded, config["base"])
    return None if model is None else SimpleNamespace(model=model, accelerator=trainer.accelerator)


def lay_out(
    stored: Sequences, config: Mapping[str, Any], micro_tokens: int, model: PreTrainedModel
) -> tuple[Sequences, Plan, str, str]:
    """(what is trained on, the plan, the layout's name, why that one).

    Sequences that do not fork are a row each where that pads little. Otherwise they are packed as trees, if the model
    can be trained on those; if it cannot, each branch is a row.
    """
    from etpi_resources.trainers.workers.plan import make_plan
    from etpi_resources.trainers.workers.tree_attention import refuses_trees

    train = config["train"]

    def plan_of(sequences: Sequences, packed: bool) -> Plan:
        return make_plan(
            sequences.lengths().tolist(),
            sequences.rows.tolist(),
            sequences.totals(sequences.weights).tolist(),
            epochs=train["epochs"],
            max_steps=train["max_steps"],
            batch_tokens=train["batch_tokens"],
            micro_tokens=micro_tokens,
            batch_sequences=train.get("batch_sequences"),
            schedule=train["schedule"],
            warmup=train["warmup_ratio"],
            seed=config["seed"],
            packed=packed,
        )

    if not stored.fork:
        rows = plan_of(stored, False)
        padding = rows.padding(stored.lengths())
        if padding <= PADDING_BORNE:
            return stored, rows, "rows", f"nothing forks and {padding:.1%} of a row each is padding"
        packed = plan_of(stored, True)
        gain = f"{padding:.1%} of a row each would be padding, {packed.padding(stored.lengths()):.1%} packed"
        if packed.padding(stored.lengths()) >= padding:
            return stored, rows, "rows", f"nothing forks, {gain}"
        if refusal := refuses_trees(model):
            return stored, rows, "rows", f"nothing forks, {gain}, but the model takes no packed rows: {refusal}"
        return stored, packed, "trees", gain
    if refusal := refuses_trees(model):
        branches = stored.branches()
        return branches, plan_of(branches, False), "branches", f"the model cannot be trained on trees: {refusal}"
    return stored, plan_of(stored, True), "trees", "sequences fork"


def build_trainer(
    worker: Worker,
    model: PreTrainedModel,
    plan: Plan,
    sequences: Sequences,
    *,
    gpu: bool,
    dtype: Dtype,
    at_once: bool,
) -> WeightedSFTTrainer:
    """The trainer of a plan; `at_once`: the micro-batches of a step run in threads (see `twins`)."""
    import datasets
    from transformers import AutoTokenizer

    from etpi_resources.trainers.workers.label_head import add_label_head
    from etpi_resources.trainers.workers.weighted_trainer import WeightedSFTTrainer

    add_label_head(model)
    config, train = worker.config, worker.config["train"]
    tokenizer = AutoTokenizer.from_pretrained(config["base"], local_files_only=True)
    passes = -(-plan.accumulate // train.get("shards", 1))
    pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    return WeightedSFTTrainer(
        plan=plan,
        sequences=sequences,
        pad_id=pad_id,
        at_once=at_once,
        model=model,
        args=sft_arguments(
            train,
            worker.folder / "trl",
            steps=plan.steps,
            accumulate=1 if at_once else passes,
            seed=config["seed"],
            gpu=gpu,
            dtype=dtype,
        ),
        train_dataset=datasets.Dataset(sequences.table()),
        data_collator=lambda batch: batch,
        processing_class=tokenizer,
        peft_config=lora_config(train) if train["method"] == "lora" else None,
    )


def lora_config(train: Mapping[str, Any]) -> LoraConfig:
    """The adapter that a train section asks for."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=train["lora_rank"],
        lora_alpha=train["lora_alpha"],
        lora_dropout=train["lora_dropout"],
        target_modules=train["target_modules"],
    )


def sft_arguments(
    train: Mapping[str, Any], folder: Path, *, steps: int, accumulate: int, seed: int, gpu: bool, dtype: Dtype
) -> SFTConfig:
    """TRL's arguments for a train section."""
    from trl.trainer.sft_config import SFTConfig

    return SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        gradient_accumulation_steps=accumulate,
        learning_rate=train["learning_rate"],
        weight_decay=train["weight_decay"],
        max_grad_norm=GRADIENT_NORM,
        optim=train["optimizer"],
        bf16=dtype == "bf16",
        use_cpu=not gpu,
        gradient_checkpointing=train["gradient_checkpointing"],
        seed=seed,
        # The sequences are tokens with labels already: nothing is prepared, cut or packed by the trainer.
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=False,
        completion_only_loss=False,
        remove_unused_columns=False,
        # Saving, logging and evaluation are ours (see Log); the trainer's own would stall each step.
        save_strategy="no",
        logging_strategy="no",
        eval_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
    )


def _folder(worker: Worker, step: int) -> Path:
    return worker.folder / f"step-{step}"


def _entry(step: int, final: bool, log: Log, lora: bool) -> dict[str, Any]:
    """A checkpoint's row: its figures are the last measured at or before its step."""
    lines = [line for line in log.lines if line["step"] <= step]
    last = {
        key: next((line[key] for line in reversed(lines) if line[key] is not None), None)
        for key in ("loss", "token_accuracy", "val_loss")
    }
    return {
        "step": step,
        "final": final,
        "folder": f"step-{step}",
        "adapter": f"step-{step}/adapter" if lora else None,
        "train_loss": last["loss"],
        "token_accuracy": last["token_accuracy"],
        "val_loss": last["val_loss"],
    }


def _counted(trainer: WeightedSFTTrainer, sequences: Any) -> dict[str, Any]:
    """What entered the loss in the first pass beside what the plan meant to feed it."""
    import numpy as np

    plan, tally = trainer.plan, trainer.of_all(trainer.first_pass)
    fed = [s for batch in plan.batches[: plan.pass_batches] for s in batch.sequences]
    return {
        "complete": len(fed) == len(sequences),
        "labels": int(tally.labels),
        "labels_planned": int(sequences.totals(sequences.labels >= 0)[fed].sum()),
        # What several branches share is one token of the dataset.
        "tokens": int(tally.tokens - tally.repeated),
        "tokens_planned": int(np.sum((sequences.lengths() - sequences.repeated)[fed])),
    }


def main() -> None:
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    with open_worker() as worker:
        # `record` leaves the reason of a failure to whoever started several of this process.
        result = record(run)(worker)
        if dist.is_initialized():
            dist.destroy_process_group()
        assert result is not None
        worker.finish(result)


if __name__ == "__main__":
    main()
