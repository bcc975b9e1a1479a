"""Contents of a training worker's `config.json` and `result.json`, one pair of models per worker.

Both sides import this module: the process that starts a worker, and the worker in its own interpreter. It imports
neither torch nor etpi_assets. A key that is missing or unknown is a validation error on the side that reads.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from etpi_resources.trainers.precision import Dtype, SpecDtype


class WorkerModel(BaseModel):
    """Base of configs and results: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


# --- training from a checkpoint (`sft_worker`, `grpo_worker`) --------------------------------------------------------


class LoraSettings(WorkerModel):
    """The adapter of LoRA training; a full training ignores it."""

    lora_rank: int
    lora_alpha: int
    lora_dropout: float
    target_modules: str


Tracker = Literal["trackio", "wandb", "mlflow", "tensorboard"]


class Tracking(WorkerModel):
    """Trackers of a worker (`trainers.trackers`); `folder` is for the trackers' own files."""

    report_to: tuple[Tracker, ...]
    run_name: str
    folder: str


class TrackerWorkerConfig(WorkerModel):
    """Values to report as a run of their own, by name (`tracker_worker`)."""

    tracking: Tracking
    values: dict[str, float]


class TrackerWorkerResult(WorkerModel):
    """The name of the run that has the values."""

    run_name: str


class TunedModel(WorkerModel):
    """The checkpoint that training starts from, and how the trained one is saved.

    Attributes:
        label: heads the worker's log lines.
        base: folder of the start checkpoint. base_name: its name in an adapter's config.
        chat_template: written beside the trained weights; None keeps the tokenizer's own.
        end_ids: the ids that end a turn under it, which may not be the tokenizer's end of text.
        device: "cuda" requires a GPU, "auto" uses one where there is one.
        tracking: None reports to the lake alone.
    """

    label: str
    base: str
    base_name: str
    seed: int
    chat_template: str | None
    end_ids: tuple[int, ...] = ()
    device: Literal["auto", "cuda"]
    tracking: Tracking | None = None


class SavedCheckpoint(WorkerModel):
    """One saved step, its folders relative to the worker's; its figures are the last measured at or before the step."""

    step: int
    final: bool
    folder: str
    adapter: str | None
    train_loss: float | None
    token_accuracy: float | None = None
    val_loss: float | None


class SavedFigures(WorkerModel):
    """Differences of the last checkpoint from the base and from its files. Of adapters, also of the checkpoint in use.

    Attributes:
        dtype: of the saved weights. compared_in: the dtype that both sides of a logit difference computed in.
        base_difference, reload_difference, merge_difference: of logits, relative to the largest: trained against base
            (LoRA alone), read back against trained, adapter merged against adapter attached (LoRA alone). None: not
            compared, because the model read back did not fit beside the trained one.
        changed_share: entries of the trained weights (LoRA: of the weights below an adapter) that the saved files have
            otherwise than the base, over all.
        differing: names of tensors that read back otherwise.
        unchanged, trained: names of trained tensors that equal the base's, and how many were trained (full alone).
        zero_adapters, adapters: names of lora_B that are all zero, and how many lora_B there are (LoRA alone).
    """

    dtype: str
    compared_in: str
    changed_share: float
    differing: tuple[str, ...]
    base_difference: float | None = None
    reload_difference: float | None = None
    merge_difference: float | None = None
    unchanged: tuple[str, ...] | None = None
    trained: int | None = None
    zero_adapters: tuple[str, ...] | None = None
    adapters: int | None = None


class PhaseSeconds(WorkerModel):
    """Wall time of a worker's phases."""

    start: float
    train: float
    save: float


class TrainingFigures(WorkerModel):
    """Figures that SFT and GRPO share; `dtype` is that of the passes."""

    saved: SavedFigures
    seconds: PhaseSeconds
    device: str
    dtype: Dtype
    libraries: dict[str, str]


# --- supervised fine-tuning ------------------------------------------------------------------------------------------


class SftSettings(LoraSettings):
    """Settings of the SFT worker from a train section (`etpi_assets.specs.training.TrainSection` documents it)."""

    method: Literal["lora", "full"]
    epochs: float
    max_steps: int | None
    learning_rate: float
    schedule: Literal["cosine", "linear", "constant"]
    warmup_ratio: float
    weight_decay: float
    batch_tokens: int
    batch_sequences: int | None
    save_steps: int | None
    use_epoch: float | None
    use_step: int | None
    stop_at_used: bool
    dtype: SpecDtype
    gradient_checkpointing: bool
    optimizer: str
    loss_kernel: Literal["tiles", "liger"]
    layer_kernels: Literal["auto", "torch", "liger"]
    shards: int


class SftWorkerConfig(TunedModel):
    """One fine-tuning run; `files` are parquet files of sequences, `micro_tokens` the tokens of one forward pass,
    `state_seconds` the least time between two states that a killed run continues from."""

    files: tuple[str, ...]
    micro_tokens: int
    state_seconds: float = 600.0
    train: SftSettings


class SftLogLine(WorkerModel):
    """One logged step. Loss and accuracy are of the steps since the line before, `tokens` and `seconds` so far."""

    step: int
    epoch: float
    loss: float | None = None
    token_accuracy: float | None = None
    val_loss: float | None = None
    learning_rate: float | None = None
    tokens: int
    seconds: float


class FirstPass(WorkerModel):
    """Labels, their weights and tokens that entered the loss in the first pass, and those that the plan contains.

    `complete` is False where the run ended before its first pass did; the counts are then of the part that was trained.
    Weights are None in reports from before they were counted.
    """

    complete: bool
    labels: int
    labels_planned: int
    tokens: int
    tokens_planned: int
    weights: float | None = None
    weights_planned: float | None = None


class PlanSummary(WorkerModel):
    """The batches of a run (`workers.plan`).

    Attributes:
        padding: share of all tokens that is padding. shapes: (rows, tokens a row) of its micro-batches.
        layout: "rows" (a row per sequence), "trees" (prefix trees packed into rows) or "branches" (a row per branch,
            for models that cannot be trained on trees); `layout_because` says why.
        step_weight: the constant that a step's loss is divided by. accumulate: micro-batches a step.
    """

    steps: int
    sequences: int
    epochs: float
    weighted_rows: float
    padding: float
    shapes: tuple[tuple[int, int], ...]
    layout: Literal["rows", "trees", "branches"]
    branches: int
    layout_because: str
    step_weight: float
    accumulate: int


class SftFigures(TrainingFigures):
    """Figures of a fine-tuning besides its checkpoints."""

    log: tuple[SftLogLine, ...]
    counted: FirstPass
    plan: PlanSummary


class SftWorkerResult(SftFigures):
    """A finished fine-tuning run; its checkpoints in order of steps."""

    checkpoints: tuple[SavedCheckpoint, ...]


# --- blame -----------------------------------------------------------------------------------------------------------


class BlameWorkerConfig(WorkerModel):
    """The influence of training rows on a held-out metric, by the weights of one checkpoint.

    Attributes:
        model: folder of the weights; of an adapter, its base. adapter: its folder; then its weights alone count.
        files, rows: parquet files of `sequences` and of `dataset_rows`.
        heldout: a file of sequences named by their tasks; raising the metric makes the tokens of split "raised"
            likelier, those of split "lowered" less likely.
        checkpoint: the columns seed, step and objective of every row.
        extremes: rollouts at either end whose influence is divided by held-out task.
    """

    label: str
    checkpoint: dict[str, int | str]
    model: str
    adapter: str | None
    files: tuple[str, ...]
    rows: tuple[str, ...]
    heldout: str
    device: Literal["auto", "cuda"]
    micro_tokens: int
    extremes: int


class BlameWorkerResult(WorkerModel):
    """Besides the files `blame.parquet` and `blame_tasks.parquet`, which the worker leaves in its folder.

    Attributes:
        exact, measured: influence of some sequences by their gradients, and by two forward passes.
        tokens: of the training sequences. memory_mb: the most that the process, or a GPU, had.
    """

    exact: tuple[float, ...]
    measured: tuple[float, ...]
    tokens: int
    seconds: float
    memory_mb: int


# --- GRPO ------------------------------------------------------------------------------------------------------------


Loss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"]
ROW_LOSSES: frozenset[str] = frozenset({"grpo", "dr_grpo", "sapo", "luspo"})
"""Losses that TRL divides by the rows of a pass."""
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class GrpoSettings(LoraSettings):
    """Settings of the GRPO worker from an rl section (`etpi_assets.specs.training.RLSection` documents it);
    `temperature` is that of the section's agent."""

    tuning: Literal["full", "lora"]
    distil_weight: float
    outcome_weight: float
    processes: int
    sharded: bool
    repeatable: bool
    temperature: float
    group_size: int
    device_batch: int
    accumulate: int
    round_size: int
    iterations: int
    steps: int
    ahead: int
    learning_rate: float
    schedule: str
    warmup_steps: int
    weight_decay: float
    optimizer: str
    max_grad_norm: float
    loss: Loss
    beta: float
    use_bias_correction_kl: bool
    clip_low: float
    clip_high: float
    delta: float | None
    importance_sampling_level: Literal["token", "sequence"]
    entropy_coef: float
    top_entropy_quantile: float
    off_policy_mask_threshold: float | None
    correction: Correction
    correction_min: float
    correction_max: float
    pass_tokens: int | None
    max_prompt_tokens: int
    max_response_tokens: int
    save_steps: int | None
    use_step: int | None
    last_step: int
    dtype: SpecDtype
    gradient_checkpointing: bool

    def rounds(self, step: int) -> range:
        """Return the steps of the rounds that may be rolled out once `step` optimiser steps are done, as far ahead as
        `ahead` lets them be."""
        return range(step, min(self.last_step, step + self.ahead * self.iterations + 1), self.iterations)


class PublishConfig(WorkerModel):
    """The hand-over of weights to the servers that generate a policy's rollouts (`workers.hand_over`).

    Attributes:
        folder: for weights under way. probe: ids of the prompt that proves each hand-over. bound: the largest mean
            difference of log-probs that rounding explains (nats a token).
    """

    folder: str
    probe: tuple[int, ...]
    bound: float


class GrpoWorkerConfig(TunedModel):
    """One GRPO run.

    Attributes:
        link: socket of the process that rolls out (`policy_link`). tasks: how many task rows it has.
        resume: the step whose checkpoint the run continues from; None starts it. resume_every: steps between such
            checkpoints.
        publish: None where the worker generates itself.
        teacher: folder of the model that is distilled; None: advantages are the groups' alone.
    """

    chat_template: str  # pyright: ignore[reportIncompatibleVariableOverride]: it is frozen, so narrower is safe
    link: str
    tasks: int
    resume: int | None
    resume_every: int
    publish: PublishConfig | None
    teacher: str | None = None
    rl: GrpoSettings


class GrpoLogLine(WorkerModel):
    """One optimiser step.

    Attributes:
        step: steps done. tokens, seconds: generated and spent so far, resumed runs included.
        parsed, solved, called, constant_groups: shares of the step's rollouts, and of its groups.
        staleness, staleness_max: steps since the weights that generated the rollouts, mean and largest.
        weight_mean: of the tokens' importance weights; weight_clipped: share of tokens whose weight was above
            `correction_max`. None without correction.
        rollout_seconds, update_seconds, publish_seconds: of the step; None in lines from before they were measured.
        logprob_gap, logprob_gap_max: mean and largest difference between rollout and trainer log-probs, nats a token,
            of passes with staleness 0; None where there were none.
        entropy, clip_share, kl, gradient_norm, response_tokens: as TRL measures them.
        truncated: share of the agents whose last turn was cut at a length limit, of a rollout on average.
        teacher_gap: mean of log p_policy - log p_teacher over the round's tokens, an estimate of the reverse KL, nats;
            teacher_seconds: of scoring. None without a teacher.
        replaced, left_out: rollouts that others replaced, and those that are in no loss; None: none.
    """

    step: int
    loss: float
    learning_rate: float
    tokens: int
    seconds: float
    reward: float
    reward_std: float
    parsed: float
    solved: float
    called: float
    constant_groups: float
    staleness: float
    logprob_gap: float | None
    logprob_gap_max: float | None
    entropy: float | None
    clip_share: float | None
    kl: float | None
    gradient_norm: float | None
    response_tokens: float | None
    truncated: float | None
    staleness_max: float | None = None
    weight_mean: float | None = None
    weight_clipped: float | None = None
    rollout_seconds: float | None = None
    update_seconds: float | None = None
    publish_seconds: float | None = None
    teacher_gap: float | None = None
    teacher_seconds: float | None = None
    replaced: int | None = None
    left_out: int | None = None


class GrpoFigures(TrainingFigures):
    """Figures of a GRPO run besides its checkpoints; `resumed` is the step that it continued from."""

    log: tuple[GrpoLogLine, ...]
    resumed: int | None


class GrpoWorkerResult(GrpoFigures):
    """A finished GRPO run; its checkpoints in order of steps."""

    checkpoints: tuple[SavedCheckpoint, ...]


class StageProgress(WorkerModel):
    """Progress of a worker's stage; `note` ends the displayed line."""

    stage: str
    done: int
    total: int
    note: str
