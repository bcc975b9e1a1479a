"""What an experiment's spec may say of training: the base, supervised fine-tuning, reinforcement.

Belongs here: every knob, its default, bounds and meaning. Does not belong here: what is trained on
(`specs.experiment`), or acting on a knob.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from etpi_assets.specs.rollout_set import AgentSection, TinySection
from etpi_assets.specs.section import Omitted, Section
from etpi_assets.specs.server import ServerSection
from etpi_resources.trainers.workers.precision import SpecDtype

DTYPE = "of the passes; auto: bf16 on a GPU that has it, else fp32. On a CPU it is always fp32"
SHARDED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""PyTorch's own, which work on shards of tensors; those of bitsandbytes do not."""


class BaseSection(Section):
    """What training starts from."""

    kind: Literal["tiny", "hub", "path", "none"] = "tiny"
    repo: str | None = None
    revision: str | None = None
    path: str | None = None
    sha256: str | None = None
    tokenizer: str = Field(default="tiny", description="tiny, qwen3, a local folder, or hub:<repo>@<commit>")
    chat_template: str = Field(
        default="tiny", description="tiny, terminal, qwen3, ... (a template of TRL), or a local file"
    )
    tiny: TinySection = TinySection()

    @model_validator(mode="after")
    def _pinned(self) -> BaseSection:
        if self.kind == "hub" and not (self.repo and self.revision):
            raise ValueError("a hub base needs `repo` and a pinned `revision`")
        if self.kind == "path" and not (self.path and self.sha256):
            raise ValueError("a path base needs `path` and `sha256`")
        return self


class TrainSection(Section):
    """Supervised fine-tuning."""

    method: Literal["lora", "full", "none"] = "full"
    epochs: float = Field(default=2.0, gt=0, description="in weighted rows")
    max_steps: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=2e-5, ge=0, description="the tiny model wants a hundred times more")
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1, description="share of the weighted rows; linear")
    weight_decay: float = 0.0
    batch_tokens: int = Field(default=8192, ge=64, description="tokens of one optimiser step, padding included")
    batch_sequences: Annotated[int | None, Omitted(None)] = Field(
        default=None,
        ge=1,
        description='sequences of one optimiser step, one a forward pass, instead of batch_tokens; "none": by tokens',
    )
    save_steps: int | None = Field(default=None, ge=1, description="an addressable checkpoint every so many steps")
    use_epoch: Annotated[float | None, Omitted(None)] = Field(
        default=None,
        gt=0,
        description="the checkpoint after so many epochs is the one that is served, evaluated and reinforced; "
        '"none": the last',
    )
    lora_rank: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    target_modules: str = "all-linear"
    dtype: SpecDtype = Field(default="auto", description=DTYPE)
    gradient_checkpointing: bool = False
    optimizer: str = "adamw_torch"
    shards: Annotated[int, Omitted(1)] = Field(
        default=1,
        ge=1,
        description="processes of one machine, a GPU each (on a CPU, where there is none), over which weights, "
        "gradients and optimiser states are divided (FSDP2) and which share each step's sequences",
    )

    @model_validator(mode="after")
    def _uses_what_it_trains(self) -> TrainSection:
        if self.use_epoch is not None and self.use_epoch > self.epochs:
            raise ValueError(f"train.use_epoch = {self.use_epoch:g} is past train.epochs = {self.epochs:g}")
        return self

    @model_validator(mode="after")
    def _can_be_sharded(self) -> TrainSection:
        if self.shards == 1:
            return self
        if self.method == "lora":
            raise ValueError('train.shards is for train.method = "full": an adapter is trained in one process')
        if self.optimizer not in SHARDED_OPTIMIZERS:
            raise ValueError(
                f"train.shards does not take train.optimizer = {self.optimizer!r}, whose states are no shards; "
                f"one of {', '.join(SHARDED_OPTIMIZERS)} does"
            )
        return self


class RewardTerm(Section):
    """One reward function (`etpi_assets.scoring.rewards.functions`), its weight in the sum, and its own knobs."""

    function: str
    weight: float = 1.0
    params: dict[str, Any] = Field(default_factory=dict)


class RLSection(ServerSection):
    """Reinforcement learning after fine-tuning, or from the base where nothing is fine-tuned (DESIGN section 5). Its
    `engine` generates the rollouts: the trainer's own process, or a vLLM that is handed the weights before each round.

    A step learns from `device_batch * accumulate` rollouts, `group_size` of a task. The defaults are TRL's own of
    version 0.15, the terminal reference's library, where that reference states nothing.
    """

    engine: Annotated[Literal["transformers", "vllm"], Omitted("transformers")] = Field(
        default="transformers", description=ServerSection.model_fields["engine"].description
    )
    options: Annotated[dict[str, Any], Omitted({})] = Field(
        default_factory=dict, description=ServerSection.model_fields["options"].description
    )
    method: Literal["none", "grpo"] = "none"
    tuning: Literal["full", "lora"] = "full"
    suite: str | None = Field(default=None, description="the tasks rolled out; its split train")
    tasks: int | None = Field(default=None, ge=1, description='the first N tasks of the split; "none": all')
    agent: AgentSection = AgentSection(max_steps=1, temperature=0.9)
    sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    rewards: tuple[RewardTerm, ...] = ()
    group_size: int = Field(default=4, ge=2)
    device_batch: int = Field(default=4, ge=1, description="rollouts of one forward and backward pass")
    accumulate: int = Field(default=2, ge=1, description="passes of one optimiser step")
    iterations: int = Field(default=1, ge=1, description="optimiser steps that a batch of rollouts is used for")
    steps: int = Field(default=200, ge=1)
    learning_rate: float = Field(default=1e-6, ge=0)
    schedule: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "linear"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = 0.0
    optimizer: str = "adamw_torch"
    max_grad_norm: float = Field(default=1.0, gt=0)
    loss: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = Field(
        default="grpo", description="grpo: mean of a sequence, then of sequences; dapo: mean over tokens"
    )
    beta: float = Field(default=0.04, ge=0, description="weight of the KL term against the start; 0: none")
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0)
    advantage_eps: float = Field(default=1e-8, gt=0)
    advantage_ddof: Literal[0, 1] = 1
    scale_advantage: bool = Field(default=True, description="divide by the group's standard deviation")
    mask_truncated: bool = Field(default=False, description="leave rollouts cut at a length out of the loss")
    max_prompt_tokens: int = Field(default=512, ge=1, description="a longer first prompt stops the run")
    max_response_tokens: int = Field(default=256, ge=1, description="ids after the first prompt, observations included")
    save_steps: int | None = Field(default=None, ge=1, description="an addressable checkpoint every so many steps")
    lora_rank: int = 8
    lora_alpha: int = 8
    lora_dropout: float = 0.0
    target_modules: str = "all-linear"
    dtype: SpecDtype = Field(default="auto", description=DTYPE)
    gradient_checkpointing: bool = False

    @model_validator(mode="after")
    def _can_be_learnt_from(self) -> RLSection:
        if self.method == "none":
            return self
        if not self.suite or not self.rewards:
            raise ValueError("rl.method needs `suite` and at least one entry of `rewards`")
        if self.agent.top_p != 1.0 or self.agent.temperature <= 0:
            raise ValueError(
                "rl.agent samples with top_p = 1 and a temperature above 0: a truncated distribution is not the one "
                "whose probabilities the loss computes, and greedy groups have no variance"
            )
        if self.agent.grammar:
            raise ValueError("rl.agent.grammar masks tokens, and the loss computes probabilities without the mask")
        if self.agent.history_think != "keep":
            raise ValueError('rl.agent.history_think = "strip" forks the prompt; a rollout must stay one sequence')
        if self.agent.compact_after:
            raise ValueError("rl.agent.compact_after forks the prompt; a rollout must stay one sequence")
        if "logprobs-mode" in {name.replace("_", "-").removeprefix("--") for name in self.options}:
            raise ValueError("rl.options.logprobs-mode is set here: the loss takes probabilities at the temperature")
        if (self.device_batch * self.accumulate) % self.group_size:
            raise ValueError("rl.device_batch * rl.accumulate must be a multiple of rl.group_size: groups stay whole")
        return self
