"""The spec of an experiment, from selection to the model card; training's sections are in `specs.training`.

All scientific settings are in specs; run configuration has operational ones only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, field_validator, model_validator

from etpi_assets.checks import OVERRIDABLE
from etpi_assets.specs.harness import HarnessSection, with_harness
from etpi_assets.specs.plugins import near
from etpi_assets.specs.rollout_set import AgentSection, Reading, ScoringSection, ServerSection, Tool
from etpi_assets.specs.section import DISTINCT, Omitted, Operational, Section
from etpi_assets.specs.training import BaseSection, RLSection, TrainSection

Behaviour = Literal[
    "plan_first", "plan_content", "follow_through",
    "plan_first_published", "plan_content_published", "follow_through_published",
]  # fmt: skip
"""Behaviours of a pair of agents, in both readings (`metrics.reading`)."""


class SelectSection(Section):
    """Rejection sampling: which rollouts train the student."""

    min_reward: float | Literal["auto"] | None = "auto"
    """Drop rollouts with a lower reward or without one; `auto`: 1.0 if any rollout has a reward, else keep all;
    "none": do not filter by reward."""
    require: tuple[Behaviour, ...] = ()
    """Behaviours that all agents of a rollout must show (docs/own_data.md)."""
    shortest_correct: bool = False
    """Keep one rollout per task: the one with the fewest output tokens among those with reward 1."""
    exit: Annotated[Literal["ended", "any"] | tuple[str, ...], Omitted("any")] = "ended"
    """The exit statuses of rollouts that train: `ended`, those that ended by themselves or state none, so neither an
    error nor a limit; `any`; or a list of statuses."""
    duplicates: Annotated[Literal["drop", "keep"], Omitted("drop")] = "drop"
    """Turns that several imported rollouts have after the same messages (a run saved after each step, histories,
    retries, copies): trained once (`drop`), or in each (`keep`). A rollout without a turn of its own is dropped."""
    max_rollouts: int | None = None
    """Keep at most N rollouts, one of every task before a second of any; "none": all."""
    exclude_repos: tuple[str, ...] = ()
    """Repositories whose rollouts are dropped."""
    exclude_rollouts: Annotated[tuple[str, ...], Omitted(())] = ()
    """Rollouts that are dropped from those that the other rules select; `etpi blame --retrain` writes them."""
    min_trust: Annotated[Literal["unchallenged", "reversed", "blind"] | None, Omitted(None)] = None
    """Drop rollouts whose verdict has a lower trust, or none (docs/verdicts.md)."""


class PairsSection(Section):
    """Building token-in/token-out pairs from turns."""

    capture: Literal["auto", "native", "retokenised"] = "auto"
    """Source of the token ids: `native` as the engine generated them, or `retokenised` from the recorded messages;
    `auto`: native if all turns of the rollout sets have ids of the student's vocabulary, else retokenised."""
    tools: tuple[Tool, ...] = ()
    """retokenised: tools that the student's prompts offer, instead of the schemas that the rollouts recorded."""
    strip_think: bool = True
    """Remove think blocks from the outputs that are trained on."""
    strip_rule: Literal["delimited", "opened"] = "delimited"
    """The removed part: `delimited`, everything through the `</think>` before the first call, even if the prompt opened
    the block; `opened` (the published rule), only a block that the output itself opens."""
    history_think: Literal["strip", "keep"] = "strip"
    """Think blocks of earlier turns in the inputs: removed or kept."""
    drop_unparseable: bool = True
    """Drop turns without a readable action."""
    drop_truncated: bool = True
    """Drop turns cut at the output limit."""

    def faults(self) -> Iterator[str]:
        if self.tools and self.capture == "native":
            yield (
                'pairs.tools are for capture = "retokenised"; native prompts offer the rollout set\'s own agent.tools'
            )


class DatasetSection(Section):
    """Weights, split and lengths of the training rows."""

    upweight_turns: tuple[int, ...] = ()
    """Turns (from 0) whose rows get `upweight_factor`."""
    upweight_factor: float = Field(default=1.0, gt=0)
    """Loss weight of those rows; the others have 1."""
    upweight_form: Literal["weight", "duplicate"] = "weight"
    """Multiply the loss by the factor, or repeat the row (a whole number of times)."""
    val_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the training repositories, or conversations, kept for validation."""
    val_by: Annotated[Literal["repository", "conversation"], Omitted("repository")] = "repository"
    """Validate on whole repositories, or on conversations of repositories that also train, as published runs do."""
    heldout_repos: tuple[str, ...] = ()
    """Repositories that never train, besides the suite's held-out split."""
    max_length: Annotated[int, Field(ge=64)] | Literal["auto"] = "auto"
    """Most tokens of input and output together; a longer pair is dropped, never cut. `auto`: as many as the base takes
    (`max_position_embeddings` of its configuration, else the tokenizer's limit)."""
    merge: Annotated[bool, Omitted(True)] = True
    """Merge rows that share a history into one sequence, for the same gradient in less time; false: a sequence is one
    row, so that `train.batch_sequences` counts rows, as in other trainers."""


class GatesSection(Section):
    """Floors and bounds of the blocking checks before training (docs/reference/checks.md). With "none" a check only
    measures and reports itself as not applicable; presets set the bounds of their method."""

    teacher: dict[str, float] = Field(default_factory=dict, examples=[{"solved": 0.5}])
    """Floors of the teacher's own rates over all its rollouts (teacher_gate), by metric: solved, plan_first,
    plan_content, follow_through, follow_own, follow_edited, follow_by_turn_5; plan_first_published,
    plan_content_published, follow_through_published."""
    first_turn_loss_share: float | None = None
    """Floor of turn 0's share of the weighted loss (turn_loss_share)."""
    format_exposure: int | None = None
    """Floor of tool calls trained on in one epoch, counted with weights (format_exposure)."""
    role_balance: float | None = None
    """Floor of the rarer role's share of the training rows (role_balance)."""
    plan_paths_in_task: float | None = None
    """Floor of the share of plans whose files and functions all occur in their task (plan_paths_in_task)."""
    prompt_length_ratio: float | None = None
    """Bound of the ratio, either way, between the median first prompts of evaluation and training."""
    template_distance: float | None = None
    """Take the text that all evaluation prompts share: the bound of the part of it that training prompts lack."""
    skip_rate: float = 0.2
    """Bound of the share of inputs, of all and of each rollout set, that neither train nor are dropped by selection
    (skip_rate)."""
    turns_lost: float = Field(default=0.2, ge=0, le=1)
    """Bound of the share of turns, and of their output tokens, that selected rollouts lose on the way to the data set
    (turns_lost), and of finished conversations that lose their last turn (label_syntax)."""
    override: dict[str, str] = Field(
        default_factory=dict, examples=[{"role_balance": "the second role is trained elsewhere"}]
    )
    """Checks whose failure is accepted: name of the check and the reason, which its message then shows. The reason
    "none" withdraws an override of the spec that this one extends."""

    @field_validator("override")
    @classmethod
    def _overrides_name_checks(cls, override: dict[str, str]) -> dict[str, str]:
        kept = {name: reason for name, reason in override.items() if reason != "none"}
        for name, reason in kept.items():
            if name not in OVERRIDABLE:
                known = ", ".join(sorted(OVERRIDABLE))
                raise ValueError(f"no check {name!r} can be overridden.{near(name, OVERRIDABLE)} These can: {known}")
            if not reason.strip():
                raise ValueError(f"give the reason why a failure of {name} is accepted")
        return kept


class ServingSection(ServerSection):
    """The engine that serves checkpoints for the probe and the evaluation."""

    engine: Literal["transformers", "vllm", "auto"] = "transformers"  # pyright: ignore[reportIncompatibleVariableOverride]
    """The generating program: `transformers`, in the process that holds the weights, a `vllm` server that etpi starts,
    or `auto`: vLLM where this machine has a GPU and a vLLM, else transformers. Versions record which."""
    servers: Annotated[int, Operational()] = Field(default=1, ge=1)
    """Checkpoints that vLLM serves at once. Their servers share the GPU, so `options` must leave room for each."""
    sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    """The sandbox of evaluation rollouts."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict, examples=[{"enable_thinking": False}])
    """Arguments of the chat template, in training and in serving alike."""
    untrained_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments that only serving passes; prompt_parity fails if they change a prompt."""

    def served_kwargs(self) -> dict[str, Any]:
        """Return the chat template's arguments in serving."""
        return {**self.template_kwargs, **self.untrained_kwargs}


class ProbeSection(Section):
    """The first-turn probe of a served checkpoint, before evaluation rollouts are spent."""

    prompts: int = 20
    """Prompts taken from training, and as many from held-out tasks."""
    min_parse: float = 0.8
    """Floor of the share of first turns with a readable action (first_turn_parses)."""
    min_differs: float = 0.5
    """Floor of the share of greedy first turns that differ from the base's in ids or probabilities
    (differs_from_base)."""


class Decoding(Section):
    """One way of sampling in evaluation."""

    name: str
    """Name in tables and reports, such as `greedy`."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: the probability mass sampled from."""


class Budget(Section):
    """A further budget of evaluation's agent; a limit that is left out stays the agent's."""

    name: str = Field(pattern=r"^[\w-]+$")
    """Appended to the decoding's name: `greedy@NAME`."""
    max_steps: int | None = Field(default=None, ge=1)
    """Most assistant turns; "none": the agent's."""
    max_model_len: int | None = Field(default=None, ge=64)
    """Most tokens of prompt and output together; "none": the agent's."""


class EvaluateSection(Section):
    """Held-out rollouts. A change here retrains nothing."""

    suite: str
    """The suite that is rolled out."""
    split: Literal["heldout", "train"] = "heldout"
    """The split of the suite."""
    tasks: int | None = Field(default=24, ge=1)
    """Only the first N tasks of the split; "none": all."""
    roles: Annotated[tuple[Literal["base", "sft", "rl"], ...], DISTINCT] = ("base", "sft")
    """The evaluated checkpoints: the base, the fine-tuned, the reinforced. The last is in the default if [rl] has a
    method."""
    decodings: Annotated[tuple[Decoding, ...], DISTINCT] = (
        Decoding(name="greedy"),
        Decoding(name="t1", temperature=1.0),
    )
    """Ways of sampling; every checkpoint runs every one."""
    sample_seeds: Annotated[tuple[int, ...], DISTINCT] = (0,)
    """Seeds of the sampler; a greedy decoding uses only the first."""
    steering_probe: bool = False
    """Also roll out the base with the steering prompt."""
    budgets: Annotated[tuple[Budget, ...], DISTINCT] = ()
    """Also roll out trained checkpoints under each of these budgets."""
    agent: AgentSection = AgentSection()
    """The agent loop of the evaluation."""
    harness: Annotated[HarnessSection | None, Omitted(None)] = None
    """The foreign harness that acts in the evaluation, instead of the agent loop (docs/any_agent.md)."""

    def longest_context(self) -> int:
        """Return the most tokens of prompt and output together under any budget."""
        return max([self.agent.max_model_len, *(budget.max_model_len or 0 for budget in self.budgets)])

    @model_validator(mode="before")
    @classmethod
    def _agent_has_the_harness(cls, values: Any) -> Any:
        return with_harness(values)


Rate = Literal["solved", "plan_first", "plan_content", "follow_through", "called", "parsed", "parse_rate", "submitted"]
Headline = Literal[
    Rate, "adherence", "think_tokens_per_turn", "post_think_tokens_per_turn", "output_tokens_per_turn",
    "turns_per_agent",
]  # fmt: skip
Threshold = Literal["plan_first", "plan_content", "follow_through"]
"""The rates that may have a threshold: each has a separate check."""


class MetricsSection(Section):
    """Thresholds of the metrics, and how they are scored."""

    main: Annotated[Rate, Omitted("solved")] = "solved"
    """The metric that the experiment's page, report and model card begin with."""
    headline: Annotated[tuple[Headline, ...], Omitted(())] = ()
    """The metrics that lead the page, the report, the model card and a run's last table; empty: `main` and those of
    `thresholds`, then the others in the order of the reports."""
    thresholds: dict[Threshold, float] = Field(default_factory=dict, examples=[{"follow_through": 0.6}])
    """Rates that trained checkpoints should reach; a miss only warns, and a rate left out has no threshold."""
    reading: Annotated[Reading, Omitted("hardened")] = "hardened"
    """The reading of plan_first, plan_content and follow_through that thresholds apply to (docs/own_data.md): ours, or
    the report's own words. Both are measured always."""
    scoring: ScoringSection = ScoringSection()
    """Patterns by which behaviours of the evaluation's rollouts are detected."""


class BlameSection(Section):
    """Influence of each training token on a held-out metric (docs/blame.md), by gradients of the fine-tuned weights."""

    metric: Literal["solved", "reward", "plan_first", "plan_content", "follow_through"] = "solved"
    """The metric of the fine-tuned checkpoint's held-out rollouts that training rows raised or lowered."""
    steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Optimiser steps whose kept checkpoints (`train.save_steps`) are averaged; empty: the checkpoint that is used. The
    held-out rollouts are that one's: by the weights of other steps the direction is off-policy, and finds less."""
    share: float = Field(default=0.5, gt=0, lt=1)
    """Share of the held-out tasks that blame reads; the others judge a retraining without the blamed rollouts."""


class CardSection(Section):
    """Texts of the model card beside the measured figures."""

    license: str = "apache-2.0"
    """Licence of the model and of exported data."""
    language: str = "en"
    """Language of the model and of exported data."""
    intended_use: str = ""
    """Intended use of the model; empty: a standard sentence."""
    limitations: tuple[str, ...] = ()
    """Known limitations; empty: derived from the metrics."""


Preset = Literal["plan_first", "structured_cot", "terminal_rl", "tool_rl", "rejection_sampling"]


_PRESETS = Path(__file__).resolve().parent / "presets"


@cache
def preset_names() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in _PRESETS.glob("*.toml")))


def preset_file(name: str) -> Path:
    """Return the file of a preset.

    Raises ValueError: there is no such preset; names those that resemble it, and all.
    """
    if name not in preset_names():
        names = preset_names()
        raise ValueError(f"there is no preset {name!r}.{near(str(name), names)} The presets are {', '.join(names)}")
    return _PRESETS / f"{name}.toml"


def preset_values(name: str) -> dict[str, Any]:
    """Return the values of a preset, as its file nests them. Raises ValueError as `preset_file` does."""
    return tomllib.loads(preset_file(name).read_text(encoding="utf-8"))


class GpusSection(Section):
    """GPUs that an experiment requires. Resolved specs have `requires = "gpu"`, so no number makes anything stale."""

    gpus: int = Field(default=1, ge=1)
    """Number of GPUs."""
    memory_gb: int = Field(ge=1)
    """Memory of each, GB."""

    def __str__(self) -> str:
        return "gpu"


class ExperimentSpec(Section):
    """Dataset build, training and evaluation, from one or more rollout sets. Each section has a hash of its own."""

    title: str
    """One line for people, shown in reports and on the leaderboard."""
    rollout_sets: Annotated[tuple[str, ...], DISTINCT]
    """The rollout sets that training data are selected from."""
    preset: Preset | None = Field(default=None, exclude=True)
    """Named values that this spec starts from (docs/reference/presets.md); keys of the spec replace them."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**32)], ...], DISTINCT] = Field(default=(0,), min_length=1)
    """Training seeds; each gives its own checkpoints."""
    requires: Annotated[Literal["cpu", "gpu"] | GpusSection, PlainSerializer(str)] = "cpu"
    """Hardware that training requires; with `cpu` a GPU is used where there is one. `{gpus = 2, memory_gb = 80}` also
    names the GPUs, by which `etpi rehearse` says whether each program fits."""
    variant: bool = False
    """An ablation: one setting differs from another experiment, with which it is compared over seeds. `demo-all`
    leaves it out."""
    base: BaseSection
    """The checkpoint that training starts from."""
    select: SelectSection = SelectSection()
    """Selection of the rollouts that train the student."""
    pairs: PairsSection = PairsSection()
    """Building pairs from turns."""
    dataset: DatasetSection = DatasetSection()
    """Weights, split and lengths."""
    gates: GatesSection = GatesSection()
    """Floors and bounds of the checks before training."""
    train: TrainSection = TrainSection()
    """Supervised fine-tuning."""
    rl: RLSection = RLSection()
    """Reinforcement learning."""
    serving: ServingSection = ServingSection()
    """Serving of checkpoints."""
    probe: ProbeSection = ProbeSection()
    """The first-turn probe."""
    evaluate: EvaluateSection | None = None
    """Held-out rollouts; "none": evaluate nothing."""
    metrics: MetricsSection = MetricsSection()
    """Thresholds and scoring."""
    blame: Annotated[BlameSection | None, Omitted(None)] = None
    """Influence of training data on a held-out metric; "none": not computed."""
    card: CardSection = CardSection()
    """The model card."""
    published: dict[str, Any] = Field(default_factory=dict)
    """Figures published elsewhere, shown beside ours: a number or a table with `value` (and `hits`, `n`) per metric;
    text for `source`, `date`, `note`."""
    notes: str = ""
    """Free text for people, shown in reports and the model card."""

    def faults(self) -> Iterator[str]:
        agents = [
            *([self.evaluate.agent] if self.evaluate else []),
            *([self.rl.agent] if self.rl.method != "none" else []),
        ]
        if (
            self.train.method != "none"
            and self.pairs.strip_think
            and any(agent.action_format == "thinking_bash" for agent in agents)
        ):
            yield (
                'pairs.strip_think cuts the <thinking> with which an answer of action_format = "thinking_bash" begins; '
                "set pairs.strip_think = false"
            )
        if self.blame is None:
            return
        if self.train.method == "none" or self.evaluate is None or "sft" not in self.evaluate.roles:
            yield (
                "[blame] joins the rows of fine-tuning with its held-out rollouts: it needs train.method, and "
                '[evaluate] with "sft" in evaluate.roles'
            )
        if self.train.shards > 1:
            yield (
                "[blame] moves all weights at a time in one process, so it does not take train.shards above 1: train "
                "and blame an adapter, or a smaller student on the same data"
            )

    @model_validator(mode="before")
    @classmethod
    def _lacking_base_is_explained(cls, values: Any) -> Any:
        return {"base": {}, **values} if isinstance(values, dict) else values

    @model_validator(mode="before")
    @classmethod
    def _reinforced_checkpoint_is_evaluated(cls, values: Any) -> Any:
        match values:
            case {"rl": {"method": method}, "evaluate": {**evaluate}} if method != "none" and "roles" not in evaluate:
                return {**values, "evaluate": {**evaluate, "roles": ("base", "sft", "rl")}}
        return values
