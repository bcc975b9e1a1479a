"""The asset graph as data: each asset's partitions, tables, inputs and spec sections.

Dagster's assets, the planner, the skip rule and the partition mappings are all derived from this declaration.
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
        set: the kind of its partitions; "all" for an unpartitioned asset, whose only key is "all".
        group: its group in Dagster, a column of the web page.
        tables: the lake tables in each version of it (names of `etpi_resources.lake.schemas.TABLES`).
        upstream: assets whose data versions are part of its input key, in order. Spec assets are upstream in Dagster
            only; the input key has the `sections` of a spec instead.
        sections: keys of its own spec that its result depends on, dotted below the top level; "*" is the whole spec.
        kept: the definitions ("module:name", or "module:!" for a worker) that compute its expensive results, rollouts
            or trainings. These results are stored under the code version of these definitions only, so an edit
            elsewhere in the asset reuses them. If one of these definitions changed, etpi asks a person before it
            computes them again.
        lock: an OS lock that it holds while it computes; the machine runs one asset with this lock at a time.
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
    kept: tuple[str, ...] = ()
    lock: str | None = None
    reads_path: bool = False
    kinds: tuple[str, ...] = ("parquet",)


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
        "The suite's tasks, each validated: the reference solution passes three times and the null solution fails.",
        sections=("family", "seed", "params"),
        reads_path=True,
    ),
    Node(
        "base_checkpoint",
        "experiment",
        "sources",
        ("checkpoints",),
        "The model that training starts from: a pinned hub revision, a local path with its hash, or a tiny base.",
        sections=("base",),
        kept=("etpi_assets.tiny_bases.recipe:corpus_rows", "etpi_resources.trainers.workers.base_worker:!"),
        lock="accelerator",
        kinds=("safetensors",),
    ),
    Node(
        "raw_rollouts",
        "rollout_set",
        "rollouts",
        ("rollouts", "agents", "turns", "messages", "quarantined"),
        "Rollouts exactly as captured: every prompt and output as token ids, every message, and quarantined rollouts.",
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
        kept=(
            "etpi_assets.rollouts.assets:_family_and_sandboxes",
            "etpi_assets.rollouts.assets:_open_engine",
            "etpi_assets.rollouts.assets:_rollout_function",
        ),
        lock="sandboxes",
        reads_path=True,
    ),
    Node(
        "scored_rollouts",
        "rollout_set",
        "rollouts",
        ("scores", "agent_scores", "turn_scores"),
        "The verifier's reward, the exit status and the three behaviours of every rollout.",
        upstream=("raw_rollouts", "tasks"),
        sections=("scoring", "agent.grammar", "agent.tools"),
    ),
    Node(
        "selected_trajectories",
        "experiment",
        "curation",
        ("selected", "dropped"),
        "Rejection sampling: the rollouts that train the student, and the dropped ones with reasons.",
        upstream=("scored_rollouts", "raw_rollouts"),
        sections=("rollout_sets", "select", "base", "gates.override"),
    ),
    Node(
        "tito_pairs",
        "experiment",
        "curation",
        ("pairs", "dropped"),
        "Token-in/token-out pairs, one per assistant turn: steering removed, thoughts optionally, other ids unchanged.",
        upstream=("selected_trajectories", "raw_rollouts", "tasks"),
        sections=("pairs", "base", "serving.template_kwargs", "serving.options.tool-call-parser", "gates.override"),
    ),
    Node(
        "upweighted_dataset",
        "experiment",
        "curation",
        ("dataset_rows", "sequences", "dropped"),
        "Weighted rows, split by repository and merged into the sequences that the trainer reads.",
        upstream=("tito_pairs", "selected_trajectories", "scored_rollouts", "raw_rollouts", "tasks"),
        sections=(
            "dataset",
            "gates",
            "base",
            "serving.template_kwargs",
            "serving.untrained_kwargs",
            "evaluate.suite",
            "evaluate.split",
            "evaluate.agent.prompt",
            "evaluate.agent.tools",
        ),
    ),
    Node(
        "sft_checkpoint",
        "experiment",
        "training",
        ("checkpoints", "training_log"),
        "Supervised fine-tuning through TRL in its own worker process; one adapter and one merged checkpoint per seed.",
        upstream=("base_checkpoint", "upweighted_dataset"),
        sections=("train", "seeds", "requires", "base"),
        kept=("etpi_assets.training.sft:worker_config", "etpi_resources.trainers.workers.sft_worker:!"),
        lock="accelerator",
        kinds=("trl", "safetensors"),
    ),
    Node(
        "rl_checkpoint",
        "experiment",
        "training",
        ("checkpoints", "training_log", "rollouts", "agents", "turns", "messages", "rl_samples", "rewards"),
        "Group-relative policy optimisation (GRPO) from the fine-tuned checkpoint; its rollouts are recorded too.",
        upstream=("base_checkpoint", "sft_checkpoint", "tasks"),
        sections=("rl", "seeds", "requires", "base", "serving.template_kwargs"),
        kept=(
            "etpi_assets.training.assets:_environment",
            "etpi_assets.training.rounds:Rounds",
            "etpi_assets.training.grpo:worker_config",
            "etpi_resources.trainers.workers.grpo_worker:!",
        ),
        lock="accelerator",
        kinds=("trl", "safetensors"),
    ),
    Node(
        "rl_rewards",
        "experiment",
        "training",
        ("rewards",),
        "Rewards of the recorded GRPO rollouts under the current reward functions; nothing is rolled out again.",
        upstream=("rl_checkpoint", "tasks"),
        sections=("rl.rewards",),
    ),
    Node(
        "serving_probe",
        "experiment",
        "serving",
        ("probes",),
        "Checks of the served model: it differs from the base, reads its training prompts, and its turns parse.",
        upstream=("base_checkpoint", "sft_checkpoint", "rl_checkpoint", "upweighted_dataset", "tito_pairs", "tasks"),
        sections=("serving", "probe", "evaluate.suite", "evaluate.agent", "gates.override"),
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
        kept=(
            "etpi_assets.evaluation.assets:_setting",
            "etpi_assets.evaluation.assets:_serving",
            "etpi_assets.evaluation.rollouts:roll_out",
        ),
        lock="accelerator",
    ),
    Node(
        "eval_metrics",
        "experiment",
        "evaluation",
        ("metrics", "scores", "agent_scores", "turn_scores"),
        "Held-out metrics with n and 95 % intervals clustered by pair, next to the teacher's.",
        upstream=("eval_rollouts", "scored_rollouts", "tasks"),
        sections=("metrics", "evaluate.agent.grammar", "evaluate.agent.tools", "evaluate.stop"),
    ),
    Node(
        "experiment_report",
        "experiment",
        "reports",
        ("reports",),
        "The experiment's report: one self-contained HTML page, and the same in markdown.",
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
        kinds=("html", "markdown"),
    ),
    Node(
        "model_card",
        "experiment",
        "reports",
        ("reports",),
        "A model card in the format of the Hugging Face hub.",
        upstream=(
            "eval_metrics",
            "eval_rollouts",
            "sft_checkpoint",
            "rl_checkpoint",
            "upweighted_dataset",
            "base_checkpoint",
            "tasks",
        ),
        sections=("title", "notes", "card", "train", "rl", "base"),
        kinds=("markdown",),
    ),
    Node(
        "leaderboard",
        "all",
        "reports",
        ("leaderboard",),
        "The metrics of all experiments of the lake side by side.",
        upstream=("eval_metrics", "experiment_spec"),
        sections=("title",),
        lock="reports",
    ),
    Node(
        "teacher_ceiling",
        "all",
        "reports",
        ("teacher_ceiling",),
        "The teacher's metrics next to the student's: a student is bounded by its teacher.",
        upstream=("eval_metrics", "scored_rollouts", "selected_trajectories", "experiment_spec"),
        sections=("title", "rollout_sets", "select"),
        lock="reports",
    ),
    Node(
        "catalog",
        "all",
        "reports",
        (),
        "The DuckDB file, with a view of every current table. It is rebuilt each time from the whole lake.",
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
