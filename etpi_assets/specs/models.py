"""What a spec may say: the three nouns as pydantic models.

Belongs here: every knob, its default, bounds and meaning. Does not belong here: reading files (`specs.load`) or acting
on a knob. Unknown keys are errors. Everything scientific is here; run configuration holds operational knobs alone.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from etpi_resources.grammars import SLOTS, ThinkGrammar


class Section(BaseModel):
    """A table of a spec. TOML has no null: the word "none" stands for it wherever a value may be absent, as in
    `evaluate = "none"`, `select.min_reward = "none"` or `tasks = "none"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _none_is_null(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        optional = {name for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)}
        return {key: None if value == "none" and key in optional else value for key, value in values.items()}


# --- suite ---------------------------------------------------------------------------------------------------------


class SuiteSpec(Section):
    """A set of tasks. `family` names the module of `etpi_assets.tasks` that makes them; `params` are its own knobs."""

    title: str
    family: str
    seed: int = 0
    params: dict[str, Any] = Field(default_factory=dict)
    notes: str = ""


# --- rollout set ---------------------------------------------------------------------------------------------------


class TinySection(Section):
    """The embedded base model: its size, its corpus, its pretraining. A Qwen3-architecture model from scratch."""

    world: Literal["coop_tiny", "repo_fix_tiny"] = Field(
        default="coop_tiny", description="whose templated conversations and exercises it grows up on"
    )
    hidden: int = 128
    intermediate: int = 384
    layers: int = 3
    heads: int = 4
    head_dim: int = 64
    positions: int = 4096
    conversations: int = Field(default=1400, ge=1, description="of the templated corpus, one an agent")
    exercises: int = Field(default=2800, ge=0, description="a task and its right edit, nothing between")
    epochs: float = Field(default=1.0, gt=0)
    batch_tokens: int = Field(default=8192, description="tokens of one step, padding included")
    matrix_rate: float = Field(default=0.015, description="Muon's, for the matrices")
    rate: float = Field(default=2e-3, description="AdamW's, for everything else")
    reading_weight: float = Field(default=0.1, gt=0, le=1, description="loss weight of what others wrote")
    seed: int = 0


TINY = "tiny"
"""The engine model that is built here."""

_MEANS = {
    "sha256": ("transformers", "vllm"),
    "urls": ("vllm", "openai"),
    "api_key_env": ("vllm", "openai"),
    "request": ("vllm",),
    "template_kwargs": ("vllm", "openai"),
    "options": ("vllm",),
    "tiny": ("transformers",),
}
"""Which kinds of engine a key of `[engine]` is read for; elsewhere it would be ignored in silence."""


class EngineSection(Section):
    """Which model or policy acts (docs/engines.md). `skill` belongs to scripted policies; the rest to models."""

    kind: Literal["scripted", "reference", "null", "transformers", "vllm", "openai"]
    teacher: str = Field(description="the name it goes by in lineage")
    model: str | None = Field(
        default=None,
        description="checkpoint:HASH of this lake, hub:REPO@COMMIT, a folder, or tiny: the base built here from "
        "[engine.tiny]; with `urls`: the name it is served by",
    )
    tiny: TinySection | None = Field(default=None, description='transformers with model = "tiny": which base')
    sha256: str | None = Field(default=None, description="content hash of a folder that `model` names")
    urls: tuple[str, ...] = Field(default=(), description="vllm: servers that run already; openai: the one base URL")
    api_key_env: str | None = Field(default=None, description="NAME of the environment variable that holds the key")
    request: Literal["tokens", "chat"] = Field(
        default="tokens", description="vllm: ids in and out, or messages behind the server's template, ids captured"
    )
    template_kwargs: dict[str, Any] = Field(default_factory=dict, description="chat requests: the template's arguments")
    options: dict[str, Any] = Field(default_factory=dict, description="vllm started here: options of `vllm serve`")
    timeout: float = Field(default=600.0, gt=0, description="seconds a request may take")
    skill: dict[str, float] = Field(default_factory=dict)
    noncanonical: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="scripted: share of splittable tokens spelt otherwise than the tokenizer would",
    )

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> EngineSection:
        if self.api_key_env is not None and not re.fullmatch(r"[A-Z][A-Z0-9_]*", self.api_key_env):
            raise ValueError("api_key_env is the NAME of an environment variable (capitals), never the key itself")
        if self.kind in ("transformers", "vllm", "openai") and not self.model:
            raise ValueError(f'engine.kind = "{self.kind}" needs `model`')
        if self.kind == "openai" and len(self.urls) != 1:
            raise ValueError('engine.kind = "openai" needs one base URL in `urls`, as https://host/v1')
        for name, kinds in _MEANS.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                raise ValueError(f'engine.{name} means nothing for engine.kind = "{self.kind}", only for {kinds}')
        if (self.tiny is not None) != (self.kind == "transformers" and self.model == TINY):
            raise ValueError('a base built here takes both engine.model = "tiny" and a section [engine.tiny]')
        if self.urls and self.options:
            raise ValueError("`options` are of a server that is started here; one in `urls` runs already")
        return self


class GrammarSection(Section):
    """A think block of named slots, one line each (`etpi_resources.grammars`)."""

    slots: tuple[str, ...] = SLOTS
    max_chars: int | dict[str, int] | None = Field(
        default=None, description='the most characters of a line: of each, or by slot; "none": no bound'
    )

    @model_validator(mode="after")
    def _is_one(self) -> GrammarSection:
        self.grammar()
        return self

    def grammar(self) -> ThinkGrammar:
        return ThinkGrammar.of(self.slots, self.max_chars)


Tool = Literal["bash", "send_message", "code_interpreter"]


class AgentSection(Section):
    """The agent loop: prompt, tokenizer, budgets, sampling."""

    prompt: str = Field(default="coop", description="a folder of prompt templates under etpi_assets/rollouts/prompts")
    tokenizer: str = "tiny"
    steering: bool = Field(default=False, description="whether the plan-first protocol stands in the system prompt")
    tools: tuple[Tool, ...] = Field(
        default=(), description="tools whose schemas the chat template gets (`etpi_assets/rollouts/tools.py`)"
    )
    history_think: Literal["keep", "strip"] = Field(
        default="keep", description="token-in/token-out keeps the ids; strip forks"
    )
    compact_after: int | None = Field(
        default=None,
        ge=1,
        description="turns after which a summary of what was done takes the place of the conversation so far, again "
        'and again; "none": never',
    )
    action_format: Literal["any", "thinking_bash", "tool_or_answer"] = Field(
        default="any",
        description="what a turn may be written in; thinking_bash: the terminal prompt contract alone; tool_or_answer: "
        "a turn without a <tool_call> is the agent's answer, and its last",
    )
    max_steps: int = Field(default=12, ge=1, description="assistant turns; where there is one only, it submits")
    max_model_len: int = Field(default=2048, ge=64)
    max_tokens: int = Field(default=256, ge=8)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    grammar: GrammarSection | None = Field(
        default=None, description='what a model\'s think block must look like; "none": free'
    )

    def identity(self) -> dict[str, Any]:
        """What of this section identifies a rollout. A knob that is off leaves the ids of rollouts, and so what
        scripted engines draw by them, as they were before it came."""
        off = {"grammar": (None,), "compact_after": (None,), "tools": (None, (), []), "action_format": ("any",)}
        return {key: value for key, value in self.model_dump(mode="json").items() if value not in off.get(key, ())}


class ScoringSection(Section):
    """How behaviours are read (DESIGN section 5). Patterns are regular expressions."""

    path_pattern: str = (
        r"(?<![\w/.-])/?(?:[\w.-]+/)*[\w.-]*[\w-]\.(?:py|go|ts|tsx|js|jsx|rs|c|h|cpp|md|toml|cfg|yaml|yml|json|txt)\b"
    )
    function_pattern: str = r"\b[A-Za-z_]\w*_\w+(?=\(|`|\b)"
    keywords: tuple[str, ...] = ("plan", "split", "you", "I'll", "first", "step")
    window: int | None = Field(
        default=None, description='bash turns after the plan that count for follow_through; "none": all'
    )
    message_commands: tuple[str, ...] = ("send_message",)
    structure: GrammarSection | None = Field(
        default=None,
        description='what think blocks are held against, grammar or not; "none": the agent section\'s grammar, if any',
    )


class TemplatedSection(Section):
    """Plan-first conversations written out for every task, as text (`rollouts.templated.plan_first`)."""

    paths: Literal["fixed", "task"] = Field(
        default="task", description="the two files a plan names: of one fixed list, or of the task's own texts"
    )
    roles: Literal["both", "proposer"] = Field(default="both", description="whose conversations the set holds")
    second: Literal["plan", "wait"] = Field(
        default="plan",
        description="what the second agent opens with: a plan of its own, or a wait for the first one's, which it then "
        "acknowledges with both paths",
    )
    calls: Literal["inline", "runtime"] = Field(
        default="runtime", description="a call's tags on one line, or on lines of their own as the prompt shows them"
    )


class RolloutSetSpec(Section):
    """Rollouts of one kind: live (suite + engine + agent + K), imported (format + path), or templated (as live with a
    scripted engine, in emulated workspaces and without verdicts; with a [templated] section, written from a template
    for tasks of any suite)."""

    title: str
    kind: Literal["live", "imported", "templated"]
    suite: str | None = None
    split: Literal["train", "heldout", "all"] = "train"
    tasks: int | None = Field(default=None, ge=1, description='the first N tasks of the split; "none": all')
    k: int = Field(default=1, ge=1, description="rollouts a task")
    seed: int = 0
    sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    engine: EngineSection | None = None
    agent: AgentSection = AgentSection()
    templated: TemplatedSection | None = Field(
        default=None, description='templated: which template; "none": what the suite\'s scripted policy says'
    )
    format: str = Field(default="auto", description="imported: a format of docs/formats.md, or auto")
    path: str | None = Field(default=None, description="imported: folder; ${VARIABLE} is taken from the environment")
    options: dict[str, Any] = Field(default_factory=dict, description="the importer's or generator's own knobs")
    license: str = Field(default="", description="imported: the data's licence, for the model card")
    scoring: ScoringSection = ScoringSection()
    notes: str = ""

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> RolloutSetSpec:
        if self.kind != "imported" and (self.suite is None or self.engine is None):
            raise ValueError(f"a {self.kind} rollout set needs `suite` and an [engine] section")
        if self.kind == "templated" and self.engine and self.engine.kind != "scripted":
            raise ValueError('a templated rollout set is written by a script: engine.kind = "scripted"')
        if self.templated and self.kind != "templated":
            raise ValueError('a [templated] section needs kind = "templated"')
        if self.templated and self.engine and self.engine.skill:
            raise ValueError("engine.skill belongs to a scripted policy; a [templated] section has knobs of its own")
        if self.agent.grammar and (self.engine is None or self.engine.kind not in ("transformers", "vllm")):
            raise ValueError('agent.grammar binds a model\'s tokens: it needs engine.kind = "transformers" or "vllm"')
        if self.kind == "imported" and self.path is None:
            raise ValueError("an imported rollout set needs `path`")
        return self


# --- experiment ----------------------------------------------------------------------------------------------------


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


class SelectSection(Section):
    """Rejection sampling."""

    min_reward: float | None = Field(default=1.0, description='drop below it; "none": the reward does not filter')
    require: tuple[Literal["plan_first", "plan_content", "follow_through"], ...] = ("plan_first", "plan_content")
    shortest_correct: bool = Field(
        default=True, description="one rollout a task: the fewest output tokens among reward == 1"
    )
    max_rollouts: int | None = Field(
        default=None,
        description="equalise sizes: the first N that the rules left, a task's second only after all firsts",
    )
    exclude_repos: tuple[str, ...] = ()


class PairsSection(Section):
    """How turns become token-in/token-out pairs (DESIGN section 5)."""

    capture: Literal["native", "retokenised"] = "native"
    tools: tuple[Tool, ...] = Field(
        default=(), description="retokenised: tools that the student's prompts offer; native prompts have their set's"
    )
    strip_think: bool = True
    strip_rule: Literal["delimited", "opened"] = Field(
        default="delimited",
        description="what is cut: through the </think> before the first call, whatever opened the block; or, as "
        "published, only where the output itself opens one",
    )
    history_think: Literal["strip", "keep"] = "strip"
    drop_unparseable: bool = True
    drop_truncated: bool = True

    @model_validator(mode="after")
    def _tools_are_read(self) -> PairsSection:
        if self.tools and self.capture == "native":
            raise ValueError(
                'pairs.tools are for capture = "retokenised"; native prompts offer the rollout set\'s own agent.tools'
            )
        return self


class DatasetSection(Section):
    """Weights, split, lengths."""

    upweight_turns: tuple[int, ...] = (0, 1, 2)
    upweight_factor: float = Field(default=1.0, gt=0)
    upweight_form: Literal["weight", "duplicate"] = "weight"
    val_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="share of training repositories kept for validation"
    )
    heldout_repos: tuple[str, ...] = Field(default=(), description="besides the suite's held-out split")
    max_length: int = Field(default=2048, ge=64)


class GatesSection(Section):
    """Floors and bounds of the blocking checks before training. A gate is switched off by name, with the reason."""

    teacher: dict[str, float] = Field(default_factory=lambda: {"plan_first": 0.7, "plan_content": 0.7})
    first_turn_loss_share: float = Field(default=0.02, description="floor of turn 0's share of the weighted loss")
    format_exposure: int = Field(default=200, description="floor of learnt tool-call openings")
    role_balance: float = Field(default=0.25, description="floor of the rarer role's share of rows")
    plan_paths_in_task: float = Field(default=0.8, description="floor of plans whose paths occur in their task")
    prompt_length_ratio: float = Field(
        default=4.0, description="bound of median evaluation over median training prompt length"
    )
    template_distance: float = Field(
        default=0.5, description="bound of what evaluation prompts share and training prompts lack"
    )
    skip_rate: float = Field(
        default=0.2, description="bound of tasks or rollouts lost before training for reasons other than selection"
    )
    override: dict[str, str] = Field(default_factory=dict, description="check name -> why its failure is accepted")


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
    batch_sequences: int | None = Field(
        default=None,
        ge=1,
        description='sequences of one optimiser step, one a forward pass, instead of batch_tokens; "none": by tokens',
    )
    save_steps: int | None = Field(default=None, ge=1, description="an addressable checkpoint every so many steps")
    use_epoch: float | None = Field(
        default=None,
        gt=0,
        description="the checkpoint after so many epochs is the one that is served, evaluated and reinforced; "
        '"none": the last',
    )
    lora_rank: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    target_modules: str = "all-linear"
    dtype: Literal["fp32", "bf16"] = "bf16"
    gradient_checkpointing: bool = False
    optimizer: str = "adamw_torch"

    @model_serializer(mode="wrap")
    def _without_what_is_not_asked(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Checkpoints are found again by a hash of this section: a knob that is off leaves it as it was."""
        off = ("batch_sequences", "use_epoch")
        return {key: value for key, value in handler(self).items() if value is not None or key not in off}

    @model_validator(mode="after")
    def _uses_what_it_trains(self) -> TrainSection:
        if self.use_epoch is not None and self.use_epoch > self.epochs:
            raise ValueError(f"train.use_epoch = {self.use_epoch:g} is past train.epochs = {self.epochs:g}")
        return self


class RewardTerm(Section):
    """One reward function (`etpi_assets.scoring.rewards.functions`), its weight in the sum, and its own knobs."""

    function: str
    weight: float = 1.0
    params: dict[str, Any] = Field(default_factory=dict)


class RLSection(Section):
    """Reinforcement learning after fine-tuning, or from the base where nothing is fine-tuned (DESIGN section 5).

    A step learns from `device_batch * accumulate` rollouts, `group_size` of a task. The defaults are TRL's own of
    version 0.15, the terminal reference's library, where that reference states nothing.
    """

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
    dtype: Literal["fp32", "bf16"] = "bf16"
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
        if (self.device_batch * self.accumulate) % self.group_size:
            raise ValueError("rl.device_batch * rl.accumulate must be a multiple of rl.group_size: groups stay whole")
        return self


class ServingSection(Section):
    """What serves checkpoints for the probe and the evaluation."""

    engine: Literal["transformers", "vllm"] = "transformers"
    sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="the chat template's arguments, in training as in serving"
    )
    untrained_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="further ones that serving alone gives it; prompt_parity stops those that make a difference",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="vllm: options of `vllm serve`, its parsers among them"
    )

    @model_validator(mode="after")
    def _options_are_read(self) -> ServingSection:
        if self.options and self.engine != "vllm":
            raise ValueError('serving.options are of `vllm serve`: they need serving.engine = "vllm"')
        return self

    def served_kwargs(self) -> dict[str, Any]:
        """What serving gives the chat template."""
        return {**self.template_kwargs, **self.untrained_kwargs}


class ProbeSection(Section):
    """The first-turn probe, before rollouts are spent."""

    prompts: int = 20
    min_parse: float = 0.8
    min_differs: float = 0.5


class Decoding(Section):
    name: str
    temperature: float = 0.0
    top_p: float = 1.0


class Budget(Section):
    """Another budget of evaluation's agent, beside its own; a bound that is left out is the agent's."""

    name: str = Field(pattern=r"^[\w-]+$", description="stands behind the decoding's name: greedy@NAME")
    max_steps: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=64)


class EvaluateSection(Section):
    """Held-out rollouts. A change here retrains nothing."""

    suite: str = "coop_tiny"
    split: Literal["heldout", "train"] = "heldout"
    tasks: int | None = 24
    roles: tuple[Literal["base", "sft", "rl"], ...] = ("base", "sft")
    decodings: tuple[Decoding, ...] = (Decoding(name="greedy"), Decoding(name="t1", temperature=1.0))
    sample_seeds: tuple[int, ...] = (0,)
    steering_probe: bool = Field(default=False, description="also roll the base out with the steering prompt")
    budgets: tuple[Budget, ...] = Field(default=(), description="also roll trained checkpoints out under each of these")
    agent: AgentSection = AgentSection()

    @model_validator(mode="after")
    def _budgets_are_told_apart(self) -> EvaluateSection:
        names = [budget.name for budget in self.budgets]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"evaluate.budgets: {repeated} stand there twice; each needs a name of its own")
        return self


class MetricsSection(Section):
    """Thresholds and intervals."""

    thresholds: dict[str, float] = Field(
        default_factory=lambda: {"plan_first": 0.70, "plan_content": 0.70, "follow_through": 0.60}
    )
    scoring: ScoringSection = ScoringSection()


class CardSection(Section):
    """What the model card says beyond what is measured."""

    license: str = "apache-2.0"
    language: str = "en"
    intended_use: str = ""
    limitations: tuple[str, ...] = ()


class ExperimentSpec(Section):
    """Dataset build, training and evaluation, from one or more rollout sets. Each section has a hash of its own."""

    title: str
    rollout_sets: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    requires: Literal["cpu", "gpu"] = "cpu"
    base: BaseSection = BaseSection()
    select: SelectSection = SelectSection()
    pairs: PairsSection = PairsSection()
    dataset: DatasetSection = DatasetSection()
    gates: GatesSection = GatesSection()
    train: TrainSection = TrainSection()
    rl: RLSection = RLSection()
    serving: ServingSection = ServingSection()
    probe: ProbeSection = ProbeSection()
    evaluate: EvaluateSection | None = EvaluateSection()
    metrics: MetricsSection = MetricsSection()
    card: CardSection = CardSection()
    published: dict[str, Any] = Field(
        default_factory=dict, description="figures published elsewhere, shown beside ours"
    )
    notes: str = ""
