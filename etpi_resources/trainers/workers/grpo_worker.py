"""Group-relative policy optimisation of one model with TRL, full or LoRA, on rollouts that another process runs.

The policy generates in this process, from the weights that are trained, or in vLLM servers of the process that rolls
out, which get them before each round (`hand_over`). A run that was killed resumes from its last complete checkpoint;
log lines after it are dropped.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etpi_resources.trainers.contracts import (
    GrpoLogLine,
    GrpoSettings,
    GrpoWorkerConfig,
    GrpoWorkerResult,
    PhaseSeconds,
)
from etpi_resources.trainers.workers.reporting import Stage, Worker, open_worker
from etpi_resources.trainers.workers.tracking import UNTRACKED, survive_trackers, tracking_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl.trainer.grpo_config import GRPOConfig

    from etpi_resources.trainers.workers.device import Compute
    from etpi_resources.trainers.workers.policy_trainer import PolicyTrainer

CHECK_TOKENS = 128
COMPLETE_MARK = "whole"
"""A file in a trainer's checkpoint, written after all others."""

METRICS = "metrics.jsonl"
ROLLOUT_SECONDS = 7 * 24 * 3600
"""Longest time that the other ranks wait for a round."""
_TRL_METRICS = {
    "entropy": "entropy",
    "clip_share": "clip_ratio/region_mean",
    "kl": "kl",
    "gradient_norm": "grad_norm",
    "response_tokens": "completions/mean_length",
}
"""Our name of a metric -> TRL's."""


def run(worker: Worker[GrpoWorkerConfig]) -> GrpoWorkerResult | None:
    """Load, train on rollouts, prove what was saved. None on every rank but 0.

    Raises:
        RuntimeError: the config requires a GPU and there is none; a metric is not finite.
        LinkBroken: the process that rolls out stopped; the message says why.
    """
    began = time.monotonic()
    # Before TRL is imported, which imports trackio, which reads its folder from the environment then.
    tracking = tracking_arguments(worker, resumed=worker.config.resume is not None)
    from transformers.utils import logging as transformers_logging

    from etpi_resources.trainers.policy_link import connect
    from etpi_resources.trainers.workers import proof
    from etpi_resources.trainers.workers.device import choose_compute, compute_alike, device_name, libraries
    from etpi_resources.trainers.workers.sharding import gathered, load_start, mean_gradients

    transformers_logging.disable_progress_bar()
    config, rl = worker.config, worker.config.rl
    compute = choose_compute(worker, config.device, rl.dtype)
    if rl.repeatable:
        compute_alike(compute)
    model = load_start(config.base, rl.processes if rl.sharded else 1, compute, lora=rl.tuning == "lora")
    mean_gradients(model)
    device, used_libraries = device_name(compute.gpu), libraries()
    with connect(config.link) if worker.is_rank_0 else nullcontext() as link:
        trainer, engine = build_trainer(worker, model, link, compute=compute, tracking=tracking)
        log = add_log(worker, trainer, link)
        worker.log(
            f"{config.label}: {rl.last_step} steps of {rl.round_size} rollouts, {rl.tuning} tuning in "
            f"{compute.dtype} on {device}" + (f", resumed from step {config.resume}" if config.resume else "")
        )
        started = time.monotonic()
        try:
            trainer.train(resume_from_checkpoint=resume_folder(worker))
        finally:
            if engine is not None:
                engine.close()
    trained = time.monotonic()
    whole = gathered(trainer, config.base)
    if whole is None:
        return None
    folders = saved_folders(worker.folder)
    saved = proof.finish(config, whole, rl.tuning == "lora", folders, rl.use_step or rl.steps, log.check_ids())
    shutil.rmtree(worker.folder / "trl")
    return GrpoWorkerResult(
        checkpoints=proof.entries(folders, rl.use_step or rl.steps, rl.tuning == "lora", log.lines),
        log=tuple(log.lines),
        saved=saved,
        seconds=PhaseSeconds(start=started - began, train=trained - started, save=time.monotonic() - trained),
        device=device,
        dtype=compute.dtype,
        libraries=used_libraries,
        resumed=config.resume,
    )


# --- loading and preparing -------------------------------------------------------------------------------------------


def build_trainer(
    worker: Worker[GrpoWorkerConfig],
    model: PreTrainedModel,
    link: Any,
    *,
    compute: Compute,
    tracking: Mapping[str, Any] = UNTRACKED,
) -> tuple[PolicyTrainer, Any]:
    """Return the trainer, and the LiveEngine that generates from its model on rank 0; None on other ranks or if served.

    Args:
        link: what requests rollouts on rank 0; see `policy_link.PolicyClient`.
        tracking: arguments of `tracking_arguments`.
    """
    import datasets
    import torch
    from trl import import_utils

    # Where vLLM is installed, TRL imports it for servers of its own, which takes seconds.
    import_utils.is_vllm_available = lambda min_version=None: False
    from etpi_resources.chat.format import ChatFormat
    from etpi_resources.chat.tokenizer_files import read_tokenizer
    from etpi_resources.engines.live import CopyEngine, LiveEngine
    from etpi_resources.trainers.workers.checkpointing import load_model, lora_config, stored_dtype
    from etpi_resources.trainers.workers.hand_over import Publisher
    from etpi_resources.trainers.workers.policy_trainer import PolicyTrainer

    config, rl = worker.config, worker.config.rl
    tokenizer = read_tokenizer(Path(config.base))
    adapter = lora_config(rl) if rl.tuning == "lora" else None

    def roll_out(step: int, rows: Sequence[int]) -> Any:
        began = time.monotonic()
        published = None
        if publisher:
            published = publisher.publish(step, worker.is_rank_0)
            if compute.gpu:  # servers may be on these GPUs
                torch.cuda.empty_cache()
            trainer.accelerator.wait_for_everyone()
        if not worker.is_rank_0:
            return []
        with engine.generating(step) if engine else nullcontext():
            published_at = time.monotonic()
            later = {first: trainer.rows[first] for first in rl.rounds(step)[1:]}
            samples = link.roll_out(step, rows, published or engine, later)
        rollout = time.monotonic() - published_at
        # Of a round ahead, servers loaded the weights while the trainer trained.
        loading = link.publish_seconds if published and not rl.ahead else 0.0
        trainer.seconds = {"publish": published_at - began + loading, "rollout": rollout - loading}
        return samples

    trainer = PolicyTrainer(
        roll_out,
        rl,
        model=model,
        args=trainer_arguments(rl, worker.folder / "trl", config.seed, compute, tracking),
        train_dataset=datasets.Dataset.from_dict({"prompt": [str(row) for row in range(config.tasks)]}),
        processing_class=tokenizer,
        peft_config=adapter,
    )
    if config.teacher is not None:
        teacher = load_model(config.teacher, stored_dtype(config.teacher), trainer.accelerator.device)
        trainer.distil(teacher)
    trainer.eos_token_ids = [*config.end_ids] or trainer.eos_token_ids  # a rollout without one counts as truncated
    survive_trackers(trainer, worker.log)
    engine = publisher = None
    unwrapped: Any = trainer.accelerator.unwrap_model(trainer.model)
    if (publish := config.publish) is not None:
        publisher = Publisher(
            unwrapped, Path(publish.folder), config.base, config.base_name, stored_dtype(config.base), publish.probe,
            rl.ahead * rl.iterations,
        )  # fmt: skip
        trainer.largest_gap = publish.bound
    elif worker.is_rank_0 and not rl.sharded:  # no rank of a sharded model has all weights
        policy = unwrapped.get_base_model() if adapter else unwrapped
        chat = ChatFormat(config.base_name, tokenizer, config.chat_template)
        engine = (CopyEngine if rl.ahead else LiveEngine)(policy, config.base_name, chat)
    return trainer, engine


PINNED: Mapping[str, Any] = {
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "label_smoothing_factor": 0.0,
    "disable_dropout": False, "cast_lm_head_to_fp32": False, "shuffle_dataset": True, "router_aux_loss_coef": None,
    "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "sync_ref_model": False, "use_adaptive_entropy": False,
}  # fmt: skip
"""TRL's arguments that change the objective and that no spec sets, at the values of TRL 1.16: a default of a
newer library changes no recipe (`tests/training/test_objective.py` compares them)."""


TRL_NAMES: Mapping[str, str] = {
    "steps": "max_steps", "group_size": "num_generations", "device_batch": "per_device_train_batch_size",
    "accumulate": "gradient_accumulation_steps", "iterations": "num_iterations", "schedule": "lr_scheduler_type",
    "optimizer": "optim", "loss": "loss_type", "clip_low": "epsilon", "clip_high": "epsilon_high",
    "max_response_tokens": "max_completion_length",
    **{name: name for name in (
        "learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "beta", "use_bias_correction_kl", "delta",
        "importance_sampling_level", "entropy_coef", "top_entropy_quantile", "off_policy_mask_threshold", "temperature",
        "gradient_checkpointing",
    )},
}  # fmt: skip
"""Settings that are arguments of TRL -> their names there."""


def trainer_arguments(
    rl: GrpoSettings, folder: Path, seed: int, compute: Compute, tracking: Mapping[str, Any] = UNTRACKED
) -> GRPOConfig:
    """TRL's arguments for an rl section. Raises ValueError if TRL refuses the combination."""
    from trl.trainer.grpo_config import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        **{of_trl: getattr(rl, name) for name, of_trl in TRL_NAMES.items()},
        steps_per_generation=rl.accumulate,
        top_p=1.0,
        # Few shapes: on a CPU a new shape costs more than the padding.
        pad_to_multiple_of=32,
        bf16=compute.dtype == "bf16",
        use_cpu=not compute.gpu,
        seed=seed,
        # The other ranks wait while rank 0 has rollouts made; if it dies, the launcher ends them.
        ddp_timeout=ROLLOUT_SECONDS,
        # GrpoLog decides when to save; what a checkpoint to resume from contains is TRL's.
        save_strategy="no",
        save_total_limit=2,
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        **PINNED,
        **tracking,
    )


# --- training --------------------------------------------------------------------------------------------------------


class GrpoLog:
    """Writes a line per step to metrics.jsonl, sends the statistics of tokens, and saves checkpoints: those of the
    result, and those to resume from.

    Attributes:
        lines: all lines so far; of a resumed run, including those before.
    """

    def __init__(self, worker: Worker[GrpoWorkerConfig], trainer: PolicyTrainer, stage: Stage, link: Any) -> None:
        self.worker, self.trainer, self.stage, self.link = worker, trainer, stage, link
        self.rl, self.path = worker.config.rl, worker.folder / METRICS
        self.lines = self._lines_before(worker.config.resume or 0)
        if worker.is_rank_0:
            self.path.write_text("".join(map(_as_json, self.lines)))
        self.tokens = self.lines[-1].tokens if self.lines else 0
        self.seconds_before = self.lines[-1].seconds if self.lines else 0.0
        self.started = self.logged = time.monotonic()
        self._first_ids: list[int] = []

    def _lines_before(self, step: int) -> list[GrpoLogLine]:
        """Return the lines that an earlier run wrote until `step`."""
        written = self.path.read_text().splitlines() if step else []
        lines = [GrpoLogLine.model_validate_json(line) for line in written]
        return [line for line in lines if line.step <= step]

    def check_ids(self) -> Any:
        """Ids (1, L) of the run's first rollout, on which logits are compared."""
        import torch

        return torch.tensor([self._first_ids[:CHECK_TOKENS]])

    def callback(self) -> Any:
        """Return the TrainerCallback that saves checkpoints and logs."""
        from transformers import TrainerCallback

        log = self

        class Callback(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                log.save(state.global_step, control)
                log.send_statistics()

            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                log.trainer.accelerator.wait_for_everyone()  # every rank writes files of its own
                if log.worker.is_rank_0:
                    (Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE_MARK).touch()

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if logs and "loss" in logs:
                    line = log.write(state.global_step, logs)
                    # Trackers are called after this with the same dictionary: they get what training_log has.
                    logs.update(line.model_dump(exclude={"step"}, exclude_none=True))

        return Callback()

    def save(self, step: int, control: Any) -> None:
        """Save a checkpoint of the result if this step is one, and have TRL save one to resume from."""
        rl, config = self.rl, self.worker.config
        control.should_training_stop |= step == rl.last_step
        publish = step in (rl.use_step, rl.last_step) or bool(rl.save_steps and step % rl.save_steps == 0)
        if publish:
            from etpi_resources.trainers.workers import proof
            from etpi_resources.trainers.workers.sharding import gathered

            if whole := gathered(self.trainer, config.base):
                proof.save_step(config, whole, rl.tuning == "lora", self.worker.folder / f"step-{step}")
        ends_round = step % rl.iterations == 0  # a run resumed within a round would roll out another
        control.should_save = ends_round and step < rl.last_step and (publish or step % config.resume_every == 0)

    def send_statistics(self) -> None:
        """Send the statistics of a round that was trained on for the first time. A checkpoint to resume from is saved
        after this, so a resumed run has those of all rounds before it."""
        import numpy as np
        from accelerate.utils import gather_object

        if (share := self.trainer.statistics.take()) is None:
            return
        shares = gather_object([share])  # in the order of ranks, which is that of the round
        if self.trainer.accelerator.is_main_process:
            self.link.record(self.trainer.round_step, np.concatenate(shares, axis=1).tobytes())

    def write(self, step: int, logs: dict[str, float]) -> GrpoLogLine:
        """Log a step and return its line. Raises RuntimeError if a metric is not finite."""
        samples = self.trainer.round
        whole = next((sample for sample in samples if sample.left_out is None), samples[0])
        self._first_ids = self._first_ids or [*whole.prompt_ids, *whole.completion_ids]
        self.tokens += sum(sum(sample.mask) for sample in samples)
        metrics = {
            "step": step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "tokens": self.tokens,
            "seconds": self.seconds_before + time.monotonic() - self.started,
            **{
                name: sum(getattr(sample, name) for sample in samples) / len(samples)
                for name in ("parsed", "solved", "called", "truncated")
            },
            "replaced": sum(sample.replaced for sample in samples) or None,
            "left_out": sum(sample.left_out is not None for sample in samples) or None,
            **self._reward_metrics(),
            **self._gap_metrics(),
            **self._step_seconds(),
            **{name: logs.get(of_trl) for name, of_trl in _TRL_METRICS.items()},
        }
        infinite = [name for name, value in metrics.items() if value is not None and not math.isfinite(value)]
        if infinite:
            raise RuntimeError(f"{', '.join(infinite)} at step {step} is not finite; lower rl.learning_rate")
        line = GrpoLogLine.model_validate(metrics)
        self.lines.append(line)
        if self.worker.is_rank_0:
            with self.path.open("a") as file:
                file.write(_as_json(line))
        self.stage.advance(note=f"reward {line.reward:.2f}, parsed {line.parsed:.2f}, solved {line.solved:.2f}")
        return line

    def _reward_metrics(self) -> dict[str, float]:
        """Mean and deviation of the round's rewards, and the share of its groups without variance."""
        size = self.rl.group_size
        samples = self.trainer.round
        groups = [
            [sample.reward for sample in samples[start : start + size] if sample.left_out != "broken"]
            for start in range(0, len(samples), size)
        ]
        groups = [group for group in groups if group] or [[0.0]]
        rewards = [reward for group in groups for reward in group]
        mean = sum(rewards) / len(rewards)
        return {
            "reward": mean,
            "reward_std": math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)),
            "constant_groups": sum(max(group) == min(group) for group in groups) / len(groups),
        }

    def _gap_metrics(self) -> dict[str, Any]:
        """Staleness, log-prob gaps and importance weights of all ranks' passes since the last call."""
        from accelerate.utils import gather_object

        gaps, self.trainer.gaps = gather_object(self.trainer.gaps), []
        weights, self.trainer.weights = gather_object(self.trainer.weights), []
        taught, self.trainer.teacher_gaps = gather_object(self.trainer.teacher_gaps), []
        fresh = [gap for gap in gaps if gap[3] == 0]
        stale = [gap[3] for gap in gaps]
        total, above, tokens = (sum(column) for column in zip(*weights, strict=True)) if weights else (0, 0, 0)
        return {
            "staleness": sum(stale) / len(stale) if stale else 0.0,
            "staleness_max": max(stale, default=0),
            "weight_mean": total / tokens if tokens else None,
            "weight_clipped": above / tokens if tokens else None,
            "teacher_gap": sum(gap for gap, _ in taught) / max(1, sum(n for _, n in taught)) if taught else None,
            "logprob_gap": sum(gap[0] for gap in fresh) / sum(gap[2] for gap in fresh) if fresh else None,
            "logprob_gap_max": max(gap[1] for gap in fresh) if fresh else None,
        }

    def _step_seconds(self) -> dict[str, float]:
        """Wall time of the parts of the step since the last line."""
        spent, self.trainer.seconds = self.trainer.seconds, {}
        whole, self.logged = time.monotonic() - self.logged, time.monotonic()
        publish, rollout = spent.get("publish", 0.0), spent.get("rollout", 0.0)
        return {
            "publish_seconds": publish,
            "rollout_seconds": rollout,
            "update_seconds": whole - publish - rollout,
            **({"teacher_seconds": spent["teacher"]} if "teacher" in spent else {}),
        }


def add_log(worker: Worker[GrpoWorkerConfig], trainer: PolicyTrainer, link: Any) -> GrpoLog:
    """Have the trainer log, report progress, send statistics and save; returns the log that it fills."""
    from transformers import PrinterCallback

    stage = worker.stage(f"seed {worker.config.seed}, step", worker.config.rl.last_step)
    stage.advance(worker.config.resume or 0)
    log = GrpoLog(worker, trainer, stage, link)
    # Behind the trainer's own and before those of trackers.
    trainer.callback_handler.callbacks.insert(1, log.callback())
    trainer.remove_callback(PrinterCallback)
    return log


def _as_json(line: GrpoLogLine) -> str:
    return json.dumps(line.model_dump()) + "\n"


def resume_folder(worker: Worker[GrpoWorkerConfig]) -> str | None:
    """Return the TRL checkpoint that the run continues from, if any."""
    step = worker.config.resume
    return None if step is None else str(worker.folder / "trl" / f"checkpoint-{step}")


def last_complete_step(folder: Path) -> int | None:
    """Return the last step that a run in `folder` can be resumed from, if any."""
    complete = (folder / "trl").glob(f"checkpoint-*/{COMPLETE_MARK}")
    return max((int(mark.parent.name.partition("-")[2]) for mark in complete), default=None)


# --- reporting -------------------------------------------------------------------------------------------------------


def saved_folders(folder: Path) -> dict[int, Path]:
    """Step -> folder of the saved steps, in order; also those that a run saved before it was resumed."""
    steps = sorted(int(path.name.partition("-")[2]) for path in folder.glob("step-*"))
    return {step: folder / f"step-{step}" for step in steps}


if __name__ == "__main__":
    with open_worker(GrpoWorkerConfig) as worker:
        if (result := run(worker)) is not None:
            worker.finish(result)
