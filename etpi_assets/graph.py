"""The asset graph as data: what each asset is keyed by, reads, holds and is made by.

Belongs here: the one declaration that Dagster's assets, the planner, the skip rule and the partition mappings are all
derived from. Does not belong here: Dagster, or any computing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Set = Literal["suite", "rollout_set", "experiment", "all"]


@dataclass(frozen=True)
class Node:
    """One asset.

    Attributes:
        name: the asset's name.
        set: what its partitions are; "all" for an unpartitioned asset, whose only key is "all".
        group: the column it stands in, left to right in the web page.
        tables: the lake tables a version of it holds (names of `etpi_resources.schemas.TABLES`).
        upstream: assets whose data versions are part of its input key, in order. The spec assets are upstream in
            Dagster alone: what counts of a spec is the sections named here.
        sections: keys of its own spec that its result depends on, dotted below the top level ("*" is all of it).
        code: modules (dotted names) or other sources (paths from the root, as sql/…) that are its code version.
        lock: the OS lock it holds while it computes, where the machine fits only one at a time.
        reads_path: whether it reads the files that its spec's `path` names; they are part of its input key.
        summary: one or two sentences for the web page.
    """

    name: str
    set: Set
    group: str
    tables: tuple[str, ...]
    summary: str
    upstream: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    lock: str | None = None
    reads_path: bool = False
    kinds: tuple[str, ...] = ("parquet",)


BASE_TRAINING = (
    "etpi_resources.trainers.workers.base_worker",
    "etpi_resources.trainers.workers.induction",
    "etpi_resources.trainers.workers.muon",
    "etpi_resources.trainers.workers.twins",
    "etpi_resources.trainers.workers.collate",
    "etpi_resources.trainers.workers.plan",
    "etpi_resources.trainers.workers.packing",
    "etpi_resources.trainers.workers.precision",
)
"""What trains a tiny base."""
BASE_CORPUS = (
    "etpi_assets.rollouts.tiny_base",
    "etpi_assets.rollouts.templated.arithmetic_tiny",
    "etpi_assets.rollouts.templated.coop_tiny",
    "etpi_assets.rollouts.templated.repo_fix_tiny",
    "etpi_assets.rollouts.templated.emulated",
    "etpi_assets.rollouts.templated.transcripts",
    "etpi_assets.rollouts.templated.words",
    "etpi_assets.rollouts.policies",
    "etpi_assets.rollouts.prompts",
    "etpi_assets.rollouts.agent",
    "etpi_assets.rollouts.interpreter",
    "etpi_assets.rollouts.observation",
    "etpi_assets.tasks.arithmetic_tiny",
    "etpi_assets.tasks.coop_tiny",
    "etpi_assets.tasks.repo_fix_tiny",
    "etpi_resources.chat_format",
)
"""What writes the corpus of a tiny base."""
_AGENT_LOOP = (
    *(
        f"etpi_assets.rollouts.{module}"
        for module in (
            "actions", "agent", "collect", "commands", "contract", "interpreter", "interpreter_cell", "journal",
            "mailbox", "observation", "patches", "prompts", "records", "tables", "think", "tools",
        )
    ),
    "etpi_resources.chat_format",
    "etpi_resources.engines.masks",
    "etpi_resources.engines.slots",
    "etpi_resources.engines.transformers",
)  # fmt: skip
"""What rolls a checkpoint out."""
_TINY_BASE = (*BASE_CORPUS, *BASE_TRAINING, "etpi_assets.rollouts.shipped_bases", "etpi_resources/tiny_bases")
"""What makes a tiny base."""

_NODES = (
    Node("suite_spec", "suite", "specs", ("specs",), "A suite's resolved spec.", sections=("*",), kinds=("toml",)),
    Node(
        "rollout_set_spec",
        "rollout_set",
        "specs",
        ("specs",),
        "A rollout set's resolved spec.",
        sections=("*",),
        kinds=("toml",),
    ),
    Node(
        "experiment_spec",
        "experiment",
        "specs",
        ("specs",),
        "An experiment's resolved spec.",
        sections=("*",),
        kinds=("toml",),
    ),
    Node(
        "tasks",
        "suite",
        "sources",
        ("tasks", "quarantined"),
        "The suite's tasks, each proven by its reference solution (passes three times) and the null solution (fails).",
        sections=("family", "seed", "params"),
        code=("etpi_assets.tasks",),
        reads_path=True,
    ),
    Node(
        "base_checkpoint",
        "experiment",
        "sources",
        ("checkpoints",),
        "What training starts from: a pinned hub revision, a local path with its hash, or the tiny model built here.",
        sections=("base",),
        code=(
            "etpi_assets.training.pointers",
            *_TINY_BASE,
        ),
        lock="accelerator",
        kinds=("safetensors",),
    ),
    Node(
        "raw_rollouts",
        "rollout_set",
        "rollouts",
        ("rollouts", "agents", "turns", "messages", "quarantined"),
        "Rollouts exactly as captured: every prompt and output as token ids, every message, what could not be read.",
        upstream=("tasks",),
        sections=(
            "kind",
            "suite",
            "split",
            "tasks",
            "k",
            "seed",
            "sandbox",
            "engine",
            "agent",
            "templated",
            "format",
            "path",
            "options",
        ),
        code=(
            "etpi_assets.rollouts",
            "etpi_assets.tasks",
            "etpi_resources.chat_format",
            "etpi_resources.tokenizers",
            *BASE_TRAINING,
            "etpi_resources/tiny_bases",
            "etpi_resources.engines.scripted",
            "etpi_resources.sandboxes",
        ),
        lock="sandboxes",
        reads_path=True,
    ),
    Node(
        "scored_rollouts",
        "rollout_set",
        "rollouts",
        ("scores", "agent_scores", "turn_scores"),
        "The verifier's reward and the three behaviours of every rollout, exit status kept apart from behaviour.",
        upstream=("raw_rollouts", "tasks"),
        sections=("scoring", "agent.grammar", "agent.tools"),
        code=("etpi_assets.scoring",),
    ),
    Node(
        "selected_trajectories",
        "experiment",
        "curation",
        ("selected", "dropped"),
        "Rejection sampling: which rollouts train the student, which do not, and why.",
        upstream=("scored_rollouts", "raw_rollouts"),
        sections=("rollout_sets", "select", "base", "gates.override"),
        code=("etpi_assets.curation.assets", "etpi_assets.curation.select", "etpi_assets.curation.student_form"),
    ),
    Node(
        "tito_pairs",
        "experiment",
        "curation",
        ("pairs", "dropped"),
        "Token-in/token-out pairs, one an assistant turn: steering spliced out, think stripped, other ids untouched.",
        upstream=("selected_trajectories", "raw_rollouts", "tasks"),
        sections=("pairs", "base", "serving.template_kwargs", "gates.override"),
        code=(
            "etpi_assets.curation.assets",
            "etpi_assets.curation.captured",
            "etpi_assets.curation.pairs",
            "etpi_assets.curation.integrity",
            "etpi_assets.curation.student_form",
            "etpi_assets.curation.retokenise",
            "etpi_assets.curation.strip_think",
            "etpi_assets.curation.steering",
            "etpi_assets.rollouts.tools",
            "etpi_resources.chat_format",
        ),
    ),
    Node(
        "upweighted_dataset",
        "experiment",
        "curation",
        ("dataset_rows", "sequences", "dropped"),
        "Weighted rows, split by repository, merged into the sequences the trainer reads.",
        upstream=("tito_pairs", "selected_trajectories", "scored_rollouts", "raw_rollouts", "tasks"),
        sections=(
            "dataset",
            "gates",
            "base",
            "serving.template_kwargs",
            "evaluate.suite",
            "evaluate.split",
            "evaluate.agent.prompt",
            "evaluate.agent.tools",
        ),
        code=(
            "etpi_assets.curation.assets",
            "etpi_assets.curation.upweight",
            "etpi_assets.curation.merge",
            "etpi_assets.curation.prefix_trees",
            "etpi_resources.prefix_tree",
            "etpi_assets.curation.gates",
            "etpi_assets.curation.integrity",
        ),
    ),
    Node(
        "sft_checkpoint",
        "experiment",
        "training",
        ("checkpoints", "training_log"),
        "Supervised fine-tuning through TRL, in a worker process of its own; adapter and merged checkpoint a seed.",
        upstream=("base_checkpoint", "upweighted_dataset"),
        sections=("train", "seeds", "requires", "base"),
        code=(
            "etpi_assets.training.sft",
            "etpi_assets.training.sft_checks",
            "etpi_resources.trainers.workers.sft_worker",
            "etpi_resources.trainers.workers.sharding",
            "etpi_resources.trainers.workers.weighted_trainer",
            "etpi_resources.trainers.workers.plan",
            "etpi_resources.trainers.workers.collate",
            "etpi_resources.trainers.workers.label_head",
            "etpi_resources.trainers.workers.twins",
            "etpi_resources.trainers.workers.packing",
            "etpi_resources.trainers.workers.precision",
            "etpi_resources.trainers.workers.tree_attention",
            "etpi_resources.trainers.workers.checkpointing",
            "etpi_resources.prefix_tree",
            "etpi_resources.trainers.workers.proof",
        ),
        lock="accelerator",
        kinds=("trl", "safetensors"),
    ),
    Node(
        "rl_checkpoint",
        "experiment",
        "training",
        ("checkpoints", "training_log", "rollouts", "agents", "turns", "messages", "rl_samples", "rewards"),
        "Group-relative policy optimisation from the fine-tuned checkpoint; its rollouts are recorded too.",
        upstream=("base_checkpoint", "sft_checkpoint", "tasks"),
        sections=("rl", "seeds", "requires", "base", "serving.template_kwargs"),
        code=(
            "etpi_assets.training.grpo",
            "etpi_assets.training.grpo_checks",
            "etpi_assets.training.rounds",
            "etpi_assets.scoring.advantage",
            "etpi_assets.scoring.rewards",
            *_AGENT_LOOP,
            "etpi_resources.engines.live",
            "etpi_resources.trainers.policy_link",
            "etpi_resources.trainers.workers.checkpointing",
            "etpi_resources.trainers.workers.grpo_worker",
            "etpi_resources.trainers.workers.hand_over",
            "etpi_resources.trainers.workers.policy_trainer",
            "etpi_resources.trainers.workers.precision",
            "etpi_resources.trainers.workers.proof",
            "etpi_resources.trainers.workers.sample_trees",
            "etpi_resources.trainers.workers.tree_attention",
        ),
        lock="accelerator",
        kinds=("trl", "safetensors"),
    ),
    Node(
        "rl_rewards",
        "experiment",
        "training",
        ("rewards",),
        "The recorded rollouts of reinforcement, scored by the reward functions as they are now; nothing is run again.",
        upstream=("rl_checkpoint", "tasks"),
        sections=("rl.rewards",),
        code=("etpi_assets.scoring.rewards",),
    ),
    Node(
        "serving_probe",
        "experiment",
        "serving",
        ("probes",),
        "Proof that what is served was trained: it differs from base, reads the prompts of its training, and parses.",
        upstream=("base_checkpoint", "sft_checkpoint", "rl_checkpoint", "upweighted_dataset", "tito_pairs", "tasks"),
        sections=("serving", "probe", "evaluate.suite", "evaluate.agent", "gates.override"),
        code=("etpi_assets.evaluation.probes", "etpi_assets.evaluation.examination", "etpi_assets.rollouts.tools"),
        lock="accelerator",
    ),
    Node(
        "eval_rollouts",
        "experiment",
        "evaluation",
        ("rollouts", "agents", "turns", "messages"),
        "Held-out rollouts of the base, the fine-tuned and the reinforced checkpoints.",
        upstream=("serving_probe", "base_checkpoint", "sft_checkpoint", "rl_checkpoint", "tasks"),
        sections=("evaluate", "serving"),
        code=(*_AGENT_LOOP, "etpi_assets.evaluation.rollouts"),
        lock="accelerator",
    ),
    Node(
        "eval_metrics",
        "experiment",
        "evaluation",
        ("metrics", "scores", "agent_scores", "turn_scores"),
        "Held-out metrics with n and 95 % intervals clustered by pair, the teacher's beside them.",
        upstream=("eval_rollouts", "scored_rollouts", "tasks"),
        sections=("metrics", "evaluate.agent.grammar", "evaluate.agent.tools"),
        code=("etpi_assets.evaluation.metrics", "etpi_assets.scoring"),
    ),
    Node(
        "experiment_report",
        "experiment",
        "reports",
        ("reports",),
        "One self-contained HTML page and its markdown.",
        upstream=(
            "eval_metrics",
            "eval_rollouts",
            "sft_checkpoint",
            "rl_checkpoint",
            "serving_probe",
            "upweighted_dataset",
            "tito_pairs",
            "selected_trajectories",
            "raw_rollouts",
            "tasks",
        ),
        sections=("title", "notes", "published"),
        code=(
            "etpi_assets.reports.html",
            "etpi_assets.reports.facts",
            "etpi_assets.reports.iterations",
            "etpi_assets.reports.reinforcement",
            "etpi_assets/reports/templates/report.html.jinja",
            "etpi_assets/reports/templates/report.md.jinja",
        ),
        kinds=("html", "markdown"),
    ),
    Node(
        "model_card",
        "experiment",
        "reports",
        ("reports",),
        "A model card in the manner of the hub.",
        upstream=("eval_metrics", "sft_checkpoint", "rl_checkpoint", "upweighted_dataset", "base_checkpoint", "tasks"),
        sections=("title", "notes", "card", "train", "rl", "base"),
        code=("etpi_assets.reports.model_card", "etpi_assets/reports/templates/model_card.md.jinja"),
        kinds=("markdown",),
    ),
    Node(
        "leaderboard",
        "all",
        "reports",
        ("leaderboard",),
        "All experiments side by side.",
        upstream=("eval_metrics",),
        code=("etpi_assets.reports.leaderboard", "etpi_assets.reports.markdown"),
        lock="reports",
    ),
    Node(
        "teacher_ceiling",
        "all",
        "reports",
        ("teacher_ceiling",),
        "What the teacher could do beside what the student does.",
        upstream=("eval_metrics", "scored_rollouts", "selected_trajectories"),
        code=("etpi_assets.reports.leaderboard", "etpi_assets.reports.markdown"),
        lock="reports",
    ),
    Node(
        "catalog",
        "all",
        "reports",
        (),
        "The DuckDB file: every current table as a view. Made anew each time, from all there is.",
        lock="reports",
        kinds=("duckdb",),
    ),
)

GRAPH: dict[str, Node] = {node.name: node for node in _NODES}
"""Every asset by name, in topological order."""

_DATASET = ("selected_trajectories", "tito_pairs", "upweighted_dataset")
_TRAINING = ("base_checkpoint", "sft_checkpoint", "rl_checkpoint", "rl_rewards")
_EVALUATION = ("serving_probe", "eval_rollouts", "eval_metrics", "experiment_report", "model_card")
_ACROSS = ("leaderboard", "teacher_ceiling", "catalog")

JOBS: dict[str, tuple[Set, tuple[str, ...]]] = {
    "prepare_suite": ("suite", ("suite_spec", "tasks", "catalog")),
    "collect_rollouts": ("rollout_set", ("rollout_set_spec", "raw_rollouts", "scored_rollouts", "catalog")),
    "build_dataset": ("experiment", ("experiment_spec", *_DATASET, "catalog")),
    "train": ("experiment", ("experiment_spec", *_TRAINING, "catalog")),
    "evaluate": ("experiment", ("experiment_spec", *_EVALUATION, *_ACROSS)),
    "run_experiment": ("experiment", ("experiment_spec", *_DATASET, *_TRAINING, *_EVALUATION, *_ACROSS)),
    "publish_catalog": ("all", _ACROSS),
}
"""Every job: the set it is keyed by, and its assets."""
