"""Group-relative policy optimisation of one model with TRL, full or LoRA, on rollouts that another process runs.

Belongs here: one training run, from configuration to saved checkpoints and the figures its checks need. Does not belong
here: tasks, sandboxes, rewards and advantages (whoever rolls out, over `policy_link`), the trainer (`policy_trainer`).

The policy generates in this process, from the very weights that are trained, or in a vLLM server that is handed them
before each round (`hand_over`). A run that was killed goes on from its last whole checkpoint: `resume` names it, and
the lines logged after it are dropped.

Configuration (`config.json`): `label`, `base` (folder), `base_name`, `link` (socket), `tasks` (how many rows), `seed`,
`chat_template` (text), `device` ("auto" or "cuda"), `resume` (step or null), `resume_every` (steps between checkpoints
to resume from), `server` (null, or that of a vLLM: `options`, `log`, `lock`, `probe`; see `HandedPolicy`), `rl` (the
spec's section). Result: see `run`.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etpi_resources.trainers.workers.reporting import Worker, open_worker

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from etpi_resources.chat.format import ChatFormat
    from etpi_resources.trainers.workers.hand_over import HandedPolicy
    from etpi_resources.trainers.workers.policy_trainer import PolicyTrainer
    from etpi_resources.trainers.workers.precision import Dtype

CHECK_TOKENS = 128
WHOLE = "whole"
"""Stands in a trainer's checkpoint when all of it is written."""

METRICS = "metrics.jsonl"
_TRL = {
    "entropy": "entropy",
    "clip_share": "clip_ratio/region_mean",
    "kl": "kl",
    "gradient_norm": "grad_norm",
    "response_tokens": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
}
"""Our name of a figure -> TRL's."""


def run(worker: Worker) -> dict[str, Any]:
    """Train, save, read back.

    Returns:
        `checkpoints`: [{step, final, folder, adapter (folder or null), train_loss, val_loss}], folders relative to the
        worker's. `log`: a line a step, see `_Log`. `saved`: as `sft_worker.run` says. `seconds`: {start, train, save}.
        `device`, `dtype` (what was computed in, "bf16" or "fp32"), `resumed` (step or null).

    Raises:
        RuntimeError: a GPU is asked for and there is none; a figure is not finite.
        LinkBroken: whoever rolls out stopped; the message says why.
    """
    began = time.monotonic()
    config, rl = worker.config, worker.config["rl"]
    import torch
    from transformers import PrinterCallback
    from transformers.utils import logging as transformers_logging

    from etpi_resources.trainers.policy_link import connect
    from etpi_resources.trainers.workers import proof
    from etpi_resources.trainers.workers.checkpointing import load_model, stored_dtype
    from etpi_resources.trainers.workers.device import device_name, libraries, use_dtype, use_gpu

    transformers_logging.disable_progress_bar()
    gpu = use_gpu(config["device"])
    dtype = use_dtype(worker, rl["dtype"], gpu)
    lora = rl["tuning"] == "lora"
    model = load_model(config["base"], stored_dtype(config["base"]) if lora and gpu else torch.float32)
    device, used_libraries = device_name(gpu), libraries()
    with connect(config["link"]) as link:
        trainer, engine = build_trainer(worker, model, link, gpu=gpu, dtype=dtype)
        stage = worker.stage(f"seed {config['seed']}, step", rl["steps"])
        stage.advance(config["resume"] or 0)
        log = _Log(worker, trainer, stage)
        trainer.add_callback(log.callback())
        trainer.remove_callback(PrinterCallback)
        worker.say(
            f"{config['label']}: {rl['steps']} steps of {rl['device_batch'] * rl['accumulate']} rollouts, "
            f"{rl['tuning']} tuning in {dtype} on {device}"
            + (f", going on from step {config['resume']}" if config["resume"] else "")
        )
        started = time.monotonic()
        try:
            trainer.train(resume_from_checkpoint=_resumable(worker, config["resume"]))
        finally:
            engine.close()
    trained = time.monotonic()
    steps = sorted(int(p.name.partition("-")[2]) for p in worker.folder.glob("step-*"))
    folders = {step: worker.folder / f"step-{step}" for step in steps}
    ids = torch.tensor([log.prompt[:CHECK_TOKENS]])
    saved = proof.finish(config, trainer, lora, folders, ids)
    shutil.rmtree(worker.folder / "trl")
    return {
        "checkpoints": [_entry(step, step == rl["steps"], log.lines, lora) for step in steps],
        "log": log.lines,
        "saved": saved,
        "seconds": {"start": started - began, "train": trained - started, "save": time.monotonic() - trained},
        "device": device,
        "dtype": dtype,
        "libraries": used_libraries,
        "resumed": config["resume"],
    }


def build_trainer(
    worker: Worker, model: PreTrainedModel, link: Any, *, gpu: bool, dtype: Dtype
) -> tuple[PolicyTrainer, Any]:
    """The trainer, and the engine that generates from its model."""
    import datasets
    from transformers import AutoTokenizer

    from etpi_resources.chat.format import ChatFormat
    from etpi_resources.engines.live import LiveEngine
    from etpi_resources.trainers.workers.policy_trainer import PolicyTrainer

    config, rl = worker.config, worker.config["rl"]
    tokenizer = AutoTokenizer.from_pretrained(config["base"], local_files_only=True)
    adapter = None
    if rl["tuning"] == "lora":
        from peft import LoraConfig

        adapter = LoraConfig(
            task_type="CAUSAL_LM",
            r=rl["lora_rank"],
            lora_alpha=rl["lora_alpha"],
            lora_dropout=rl["lora_dropout"],
            target_modules=rl["target_modules"],
        )

    def roll_out(step: int, rows: Any) -> Any:
        with engine.generating(step):
            return link.roll_out(step, rows, engine)

    trainer = PolicyTrainer(
        roll_out,
        model=model,
        args=trainer_arguments(rl, worker.folder / "trl", config["seed"], gpu, dtype),
        train_dataset=datasets.Dataset.from_dict({"prompt": [str(row) for row in range(config["tasks"])]}),
        processing_class=tokenizer,
        peft_config=adapter,
    )
    unwrapped: Any = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    policy = unwrapped.get_base_model() if adapter else unwrapped
    chat = ChatFormat(config["base_name"], tokenizer, config["chat_template"])
    if config["server"] is None:
        engine = LiveEngine(policy, config["base_name"], chat)
    else:
        engine = _served(worker, policy, chat, dtype)
        trainer.largest_gap = engine.bound
    return trainer, engine


def _served(worker: Worker, policy: Any, chat: ChatFormat, dtype: Dtype) -> HandedPolicy:
    """The policy in a vLLM server of this worker, which computes in what the base is stored in unless the spec says
    otherwise."""
    from etpi_resources.trainers.policy_link import largest_gap
    from etpi_resources.trainers.workers.checkpointing import stored_dtype
    from etpi_resources.trainers.workers.hand_over import HandedPolicy

    config, rl = worker.config, worker.config["rl"]
    stored = stored_dtype(config["base"])
    defaults: dict[str, Any] = {
        "dtype": str(stored).removeprefix("torch."),
        "max-model-len": rl["max_prompt_tokens"] + rl["max_response_tokens"],
    }
    if policy.device.type == "cpu":
        # There weights are packed anew when they are read, out of sight of what was compiled over the old ones.
        defaults["enforce-eager"] = True
    options = {**defaults, **{name.replace("_", "-"): value for name, value in config["server"]["options"].items()}}
    worker.say(f"{config['label']}: starting vLLM, which says all in {config['server']['log']}")
    return HandedPolicy(
        policy,
        config["base_name"],
        chat,
        base=Path(config["base"]),
        folder=worker.folder / "policy",
        dtype=stored,
        bound=largest_gap(dtype, options["dtype"]),
        server={**config["server"], "options": options},
    )


def trainer_arguments(rl: dict[str, Any], folder: Path, seed: int, gpu: bool, dtype: Dtype) -> Any:
    """TRL's GRPOConfig of an `rl` section. Raises ValueError where TRL refuses the combination."""
    from trl.trainer.grpo_config import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        max_steps=rl["steps"],
        num_generations=rl["group_size"],
        per_device_train_batch_size=rl["device_batch"],
        gradient_accumulation_steps=rl["accumulate"],
        steps_per_generation=rl["accumulate"],
        num_iterations=rl["iterations"],
        learning_rate=rl["learning_rate"],
        lr_scheduler_type=rl["schedule"],
        warmup_steps=rl["warmup_steps"],
        weight_decay=rl["weight_decay"],
        max_grad_norm=rl["max_grad_norm"],
        optim=rl["optimizer"],
        loss_type=rl["loss"],
        beta=rl["beta"],
        epsilon=rl["clip_low"],
        epsilon_high=rl["clip_high"],
        scale_rewards="group" if rl["scale_advantage"] else "none",
        mask_truncated_completions=rl["mask_truncated"],
        max_completion_length=rl["max_response_tokens"],
        temperature=rl["agent"]["temperature"],
        top_p=1.0,
        # Few shapes: on a CPU each new one costs more than what padding does.
        pad_to_multiple_of=32,
        bf16=dtype == "bf16",
        use_cpu=not gpu,
        gradient_checkpointing=rl["gradient_checkpointing"],
        seed=seed,
        # When to save is ours (see _Log); what is saved to resume from is the trainer's own.
        save_strategy="no",
        save_total_limit=2,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
    )


class _Log:
    """A line a step into metrics.jsonl, checkpoints to resume from and to keep.

    A line: step (steps done), loss, learning_rate, tokens (of the policy's own, so far), seconds (so far, resumed runs
    added up), reward, reward_std, parsed, solved, called, constant_groups (share), staleness (steps since the weights
    that generated), logprob_gap, logprob_gap_max (nats), and what `_TRL` names.
    """

    def __init__(self, worker: Worker, trainer: PolicyTrainer, stage: Any) -> None:
        self.worker, self.trainer, self.stage = worker, trainer, stage
        self.rl, self.path = worker.config["rl"], worker.folder / METRICS
        done = worker.config["resume"] or 0
        known = self.path.read_text().splitlines() if done else []
        self.lines = [line for line in map(json.loads, known) if line["step"] <= done]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        self.before = self.lines[-1] if self.lines else {"tokens": 0, "seconds": 0.0}
        self.started, self.tokens = time.monotonic(), self.before["tokens"]
        self.prompt: list[int] = []

    def callback(self) -> Any:
        from transformers import TrainerCallback

        log = self

        class Callback(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                log.save(state.global_step, control)

            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                (Path(args.output_dir) / f"checkpoint-{state.global_step}" / WHOLE).touch()

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if logs and "loss" in logs:
                    log.write(state.global_step, logs)

        return Callback()

    def save(self, step: int, control: Any) -> None:
        keep = step == self.rl["steps"] or (self.rl["save_steps"] and step % self.rl["save_steps"] == 0)
        if keep:
            from etpi_resources.trainers.workers import proof

            lora = self.rl["tuning"] == "lora"
            proof.save_step(self.worker.config, self.trainer, lora, self.worker.folder / f"step-{step}")
        # What is kept must be resumable from, or a resumed run would keep it twice.
        control.should_save = step < self.rl["steps"] and bool(keep or step % self.worker.config["resume_every"] == 0)

    def write(self, step: int, logs: dict[str, float]) -> None:
        trainer, samples = self.trainer, self.trainer.round
        self.prompt = self.prompt or [*samples[0].prompt_ids, *samples[0].completion_ids]
        size = self.rl["group_size"]
        rewards = [sample.reward for sample in samples]
        groups = [rewards[at : at + size] for at in range(0, len(rewards), size)]
        mean = sum(rewards) / len(rewards)
        fresh = [gap for gap in trainer.gaps if gap[3] == 0]
        stale = [gap[3] for gap in trainer.gaps]
        trainer.gaps = []
        self.tokens += sum(sum(sample.mask) for sample in samples)
        line = {
            "step": step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "tokens": self.tokens,
            "seconds": self.before["seconds"] + time.monotonic() - self.started,
            "reward": mean,
            "reward_std": math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)),
            "parsed": sum(sample.parsed for sample in samples) / len(samples),
            "solved": sum(sample.solved for sample in samples) / len(samples),
            "called": sum(sample.called for sample in samples) / len(samples),
            "constant_groups": sum(max(group) == min(group) for group in groups) / len(groups),
            "staleness": sum(stale) / len(stale) if stale else 0.0,
            "logprob_gap": sum(g[0] for g in fresh) / sum(g[2] for g in fresh) if fresh else None,
            "logprob_gap_max": max(g[1] for g in fresh) if fresh else None,
            **{name: logs.get(theirs) for name, theirs in _TRL.items()},
        }
        bad = [name for name, value in line.items() if value is not None and not math.isfinite(value)]
        if bad:
            raise RuntimeError(f"{', '.join(bad)} at step {step} is not finite; lower rl.learning_rate")
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.stage.advance(note=f"reward {mean:.2f}, parsed {line['parsed']:.2f}, solved {line['solved']:.2f}")


def last_whole(folder: Path) -> int | None:
    """The last step that a run in `folder` can be resumed from; None where there is none."""
    found = [int(p.parent.name.partition("-")[2]) for p in (folder / "trl").glob(f"checkpoint-*/{WHOLE}")]
    return max(found, default=None)


def _resumable(worker: Worker, step: int | None) -> str | None:
    return None if step is None else str(worker.folder / "trl" / f"checkpoint-{step}")


def _entry(step: int, final: bool, lines: list[dict[str, Any]], lora: bool) -> dict[str, Any]:
    return {
        "step": step,
        "final": final,
        "folder": f"step-{step}",
        "adapter": f"step-{step}/adapter" if lora else None,
        "train_loss": next(line["loss"] for line in reversed(lines) if line["step"] <= step),
        "val_loss": None,
    }


if __name__ == "__main__":
    with open_worker() as worker:
        worker.finish(run(worker))
