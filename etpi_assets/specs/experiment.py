"""What an experiment's spec may say: from what is selected to what is reported.

Belongs here: every knob, its default, bounds and meaning. Does not belong here: training's own knobs
(`specs.training`), reading files (`specs.load`) or acting on a knob. Everything scientific is in specs; run
configuration holds operational knobs alone.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from etpi_assets.specs.rollout_set import AgentSection, ScoringSection, Tool
from etpi_assets.specs.section import Section
from etpi_assets.specs.server import ServerSection
from etpi_assets.specs.training import BaseSection, RLSection, TrainSection


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
        default=(),
        description="retokenised: tools that the student's prompts offer, in place of the schemas that the rollouts "
        "recorded; native prompts have their set's",
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
    turns_lost: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="bound of the share of turns, and of output tokens, that the data set loses of the selected "
        "rollouts; and of finished conversations whose last turn it loses",
    )
    override: dict[str, str] = Field(default_factory=dict, description="check name -> why its failure is accepted")


class ServingSection(ServerSection):
    """What serves checkpoints for the probe and the evaluation."""

    sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="the chat template's arguments, in training as in serving"
    )
    untrained_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="further ones that serving alone gives it; prompt_parity stops those that make a difference",
    )

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


Threshold = Literal["plan_first", "plan_content", "follow_through"]
"""The rates that may have a threshold: each has a check of its own."""


class MetricsSection(Section):
    """Thresholds and intervals."""

    thresholds: dict[Threshold, float] = Field(
        default_factory=lambda: {"plan_first": 0.70, "plan_content": 0.70, "follow_through": 0.60},
        description="what the trained checkpoints are to clear; a rate left out has no threshold",
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
    variant: bool = Field(
        default=False, description="another experiment but for a knob, to be compared with it over seeds: in no demo"
    )
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
