"""What a spec may say: the three nouns as pydantic models.

Belongs here: every knob, its default, bounds and meaning. Does not belong here: reading files (`specs.load`) or acting
on a knob. Unknown keys are errors. Everything scientific is here; run configuration holds operational knobs alone.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator


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


class EngineSection(Section):
    """Which model or policy acts. `skill` belongs to scripted policies; `model` to the others."""

    kind: Literal["scripted", "reference", "null", "transformers", "vllm", "openai"]
    teacher: str = Field(description="the name it goes by in lineage")
    model: str | None = None
    urls: tuple[str, ...] = ()
    skill: dict[str, float] = Field(default_factory=dict)


class AgentSection(Section):
    """The agent loop: prompt, tokenizer, budgets, sampling."""

    prompt: str = Field(default="coop", description="a folder of prompt templates under etpi_assets/rollouts/prompts")
    tokenizer: str = "tiny"
    steering: bool = Field(default=False, description="whether the plan-first protocol stands in the system prompt")
    history_think: Literal["keep", "strip"] = Field(
        default="keep", description="token-in/token-out keeps the ids; strip forks"
    )
    max_steps: int = Field(default=12, ge=1)
    max_model_len: int = Field(default=2048, ge=64)
    max_tokens: int = Field(default=256, ge=8)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)


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


class RolloutSetSpec(Section):
    """Rollouts of one kind: live (suite + engine + agent + K), imported (format + path), or templated (as live with a
    scripted engine, in emulated workspaces and without verdicts)."""

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
    format: str = Field(default="auto", description="imported: cooperbench, mini_swe_agent, swe_agent or auto")
    path: str | None = Field(default=None, description="imported: folder; ${VARIABLE} is taken from the environment")
    options: dict[str, Any] = Field(default_factory=dict, description="the importer's or generator's own knobs")
    scoring: ScoringSection = ScoringSection()
    notes: str = ""

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> RolloutSetSpec:
        if self.kind != "imported" and (self.suite is None or self.engine is None):
            raise ValueError(f"a {self.kind} rollout set needs `suite` and an [engine] section")
        if self.kind == "templated" and self.engine and self.engine.kind != "scripted":
            raise ValueError('a templated rollout set is written by a script: engine.kind = "scripted"')
        if self.kind == "imported" and self.path is None:
            raise ValueError("an imported rollout set needs `path`")
        return self


# --- experiment ----------------------------------------------------------------------------------------------------


class TinySection(Section):
    """The embedded base model: its size, its corpus, its pretraining. A Qwen3-architecture model from scratch."""

    hidden: int = 128
    intermediate: int = 384
    layers: int = 3
    heads: int = 3
    head_dim: int = 64
    positions: int = 4096
    conversations: int = Field(default=1500, ge=1, description="of the templated corpus, two a task")
    exercises: int = Field(
        default=3000, ge=0, description="tasks with the right edit alone: what each wording asks for"
    )
    epochs: float = Field(default=1.0, gt=0)
    batch_tokens: int = Field(default=8192, description="tokens of one step, padding included")
    matrix_rate: float = Field(default=0.015, description="Muon's, for the matrices")
    rate: float = Field(default=2e-3, description="AdamW's, for everything else")
    reading_weight: float = Field(default=0.1, gt=0, le=1, description="loss weight of what others wrote")
    seed: int = 0


class BaseSection(Section):
    """What training starts from."""

    kind: Literal["tiny", "hub", "path", "none"] = "tiny"
    repo: str | None = None
    revision: str | None = None
    path: str | None = None
    sha256: str | None = None
    tokenizer: str = Field(default="tiny", description="tiny, qwen3, or a local folder")
    chat_template: str = Field(default="tiny", description="tiny, qwen3, ... (a template of TRL), or a local file")
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
    strip_think: bool = True
    history_think: Literal["strip", "keep"] = "strip"
    drop_unparseable: bool = True
    drop_truncated: bool = True


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
    learning_rate: float = Field(default=1e-3, ge=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1, description="share of the weighted rows; linear")
    weight_decay: float = 0.0
    batch_tokens: int = Field(default=8192, ge=64, description="tokens of one optimiser step, padding included")
    save_steps: int | None = Field(default=None, ge=1, description="an addressable checkpoint every so many steps")
    lora_rank: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    target_modules: str = "all-linear"
    dtype: Literal["fp32", "bf16"] = "bf16"
    gradient_checkpointing: bool = False
    optimizer: str = "adamw_torch"


class RLSection(Section):
    """Reinforcement learning after fine-tuning. A method is named here when its recipe exists."""

    method: Literal["none"] = "none"


class ServingSection(Section):
    """What serves checkpoints for the probe and the evaluation."""

    engine: Literal["transformers", "vllm"] = "transformers"
    sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    template_kwargs: dict[str, Any] = Field(default_factory=dict)


class ProbeSection(Section):
    """The first-turn probe, before rollouts are spent."""

    prompts: int = 20
    min_parse: float = 0.8
    min_differs: float = 0.5


class Decoding(Section):
    name: str
    temperature: float = 0.0
    top_p: float = 1.0


class EvaluateSection(Section):
    """Held-out rollouts. A change here retrains nothing."""

    suite: str = "coop_tiny"
    split: Literal["heldout", "train"] = "heldout"
    tasks: int | None = 24
    roles: tuple[Literal["base", "sft", "rl"], ...] = ("base", "sft")
    decodings: tuple[Decoding, ...] = (Decoding(name="greedy"), Decoding(name="t1", temperature=1.0))
    sample_seeds: tuple[int, ...] = (0,)
    steering_probe: bool = Field(default=False, description="also roll the base out with the steering prompt")
    agent: AgentSection = AgentSection()


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
