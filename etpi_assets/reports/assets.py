"""The assets of the reports stage: experiment_report, model_card, leaderboard, teacher_ceiling and catalog."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

from etpi_assets.evaluation import stopping
from etpi_assets.graph import GRAPH
from etpi_assets.materialize import AssetRun, Produced, etpi_asset
from etpi_assets.planner import accepted
from etpi_assets.reports import facts, html, leaderboard, model_card
from etpi_assets.reports.iterations import iterations, iterations_board
from etpi_assets.reports.prompts import Prompt, first_prompts
from etpi_assets.reports.recorded import parsed, recorded_spec
from etpi_assets.scoring.published import in_reading
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import part
from etpi_assets.specs.published import figures
from etpi_resources import charts
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Manifest, Ref
from etpi_resources.lake.schemas import empty, from_rows

Decode = Callable[[Sequence[int]], str]


@etpi_asset("experiment_report")
def experiment_report(run: AssetRun) -> Produced:
    spec, key = run.spec, run.key
    upstream = [ref for asset in run.node.upstream for ref in run.refs(asset)]
    manifests = {ref: run.lake.require(ref) for ref in upstream}
    experiment = html.ReportedExperiment(
        name=key,
        title=spec.title,
        notes=spec.notes,
        spec=spec.model_dump(mode="json"),
        thresholds={in_reading(name, spec.metrics.reading): rate for name, rate in spec.metrics.thresholds.items()},
        reading=spec.metrics.reading,
        inputs={str(ref): _version(manifest) for ref, manifest in manifests.items()},
        checks=[{**check, "asset": ref.asset} for ref, manifest in manifests.items() for check in manifest.checks],
        seeds=spec.seeds,
        published=figures(spec.published),
        rollout_sets=run.specs.rollout_sets,
        stopped=_stopped(run),
        published_source=". ".join(str(spec.published[k]) for k in ("source", "date", "note") if k in spec.published),
    )
    tables = facts.ReportTables(
        metrics=run.read("eval_metrics", "metrics"),
        rollouts=run.read("raw_rollouts", "rollouts", columns=["wall_seconds"]),
        agents=run.read("raw_rollouts", "agents", columns=["output_tokens"]),
        eval_rollouts=run.read("eval_rollouts", "rollouts"),
        eval_agents=run.read("eval_rollouts", "agents"),
        eval_turns=run.read("eval_rollouts", "turns", columns=["rollout_id", "agent_id", "turn", "actions"]),
        eval_scores=run.read("eval_metrics", "scores"),
        eval_agent_scores=run.read("eval_metrics", "agent_scores"),
        selected=run.read("selected_trajectories", "selected"),
        dropped=run.read("selected_trajectories", "dropped"),
        pairs=run.read("tito_pairs", "pairs"),
        dataset_rows=run.read("upweighted_dataset", "dataset_rows"),
        sequences=run.read("upweighted_dataset", "sequences"),
        checkpoints=_trained(run),
        training_log=run.read("sft_checkpoint", "training_log"),
        rl_log=run.read("rl_checkpoint", "training_log"),
        probes=run.read("serving_probe", "probes"),
        tasks=run.read("tasks", "tasks"),
    )
    chat = load_chat_format(spec.base.tokenizer, spec.base.chat_template)
    experiment = replace(experiment, prompts=_prompts(run, tables, chat.decode))
    page, markdown = html.render(experiment, tables, chat.decode)
    rows = [_write(run, "report.html", "html", page), _write(run, "report.md", "markdown", markdown)]
    return Produced(
        tables={"reports": from_rows("reports", rows)},
        metadata={
            "report": dg.MetadataValue.path(run.lake.root / rows[0]["path"]),
            "summary": _as_markdown(markdown.split("## Checks")[0]),
        },
    )


@etpi_asset("model_card")
def model_card_asset(run: AssetRun) -> Produced:
    card = model_card.render(
        run.key,
        run.spec,
        metrics=run.read("eval_metrics", "metrics"),
        rollouts=run.read("eval_rollouts", "rollouts"),
        scores=run.read("eval_metrics", "scores"),
        agent_scores=run.read("eval_metrics", "agent_scores"),
        checkpoints=_trained(run),
        dataset_rows=run.read("upweighted_dataset", "dataset_rows"),
        base=run.read("base_checkpoint", "checkpoints"),
        tasks=run.read("tasks", "tasks"),
        rollout_sets=run.specs.rollout_sets,
        stopped=_stopped(run),
    )
    return Produced(
        tables={"reports": from_rows("reports", [_write(run, "README.md", "model_card", card)])},
        metadata={"card": _as_markdown(card)},
    )


def _stopped(run: AssetRun) -> list[str]:
    """Return the sentences about the rule that ended the evaluation; none if it had none."""
    return [line for ref in run.refs("eval_rollouts") for line in stopping.sentences(run.lake.require(ref).notes)]


@etpi_asset("leaderboard")
def leaderboard_asset(run: AssetRun) -> Produced:
    entries = _entries(run)
    table = leaderboard.leaderboard(entries)
    metrics = {entry.experiment: entry.metrics for entry in entries}
    specs = {**run.specs.experiments, **_evaluated_specs(run)}
    suites = sorted({spec.evaluate.suite for name, spec in specs.items() if name in metrics and spec.evaluate})
    boards = {suite: iterations(suite, specs, metrics) for suite in suites}
    return Produced(
        tables={"leaderboard": table},
        metadata={
            "board": _as_markdown(leaderboard.board(table)),
            **{
                f"experiments on {suite}": _as_markdown(iterations_board(rows, leaderboard.PAGE_CHARACTERS))
                for suite, rows in boards.items()
                if rows
            },
        },
    )


@etpi_asset("teacher_ceiling")
def teacher_ceiling(run: AssetRun) -> Produced:
    entries = _entries(run)
    teachers = {name: _teacher_data(run, name, spec) for name, spec in _evaluated_specs(run).items()}
    table = leaderboard.teacher_ceiling(entries, {name: data for name, data in teachers.items() if data})
    points = [
        (
            r["experiment"],
            r["checkpoint_role"],
            r["teacher_value"],
            r["student_value"],
            r["student_ci_low"],
            r["student_ci_high"],
        )
        for r in table.to_pylist()
        if r["metric"] == "follow_through" and "greedy" not in r["decoding"] and r["teacher_value"] is not None
    ]
    plot = charts.as_image(charts.teacher_plot("Follow-through", points), "follow-through of teacher and student")
    return Produced(
        tables={"teacher_ceiling": table},
        metadata={"plot": _as_markdown(plot), "board": _as_markdown(leaderboard.ceiling_board(table))},
    )


@etpi_asset("catalog", checks=catalog.check_names())
def catalog_asset(run: AssetRun) -> Produced:
    path = catalog.build(run.lake, GRAPH.values(), vocabularies=_vocabularies(run))
    return Produced(
        tables={},
        checks=catalog.verify(path),
        metadata={
            "file": dg.MetadataValue.path(path),
            "ask": f"duckdb -readonly {path} < sql/reports/failed_checks.sql",
        },
    )


def _prompts(run: AssetRun, tables: facts.ReportTables, decode: Decode) -> list[Prompt]:
    """Return the first prompts of a teacher's rollout that is trained on, and of an evaluated one."""
    collected: list[Prompt] = []
    if tables.dataset_rows.num_rows:
        rollout_id = tables.dataset_rows["rollout_id"][0].as_py()
        at = tables.selected["rollout_id"].to_pylist().index(rollout_id)
        rollout_set = tables.selected["rollout_set"][at].as_py()
        tokenizer = part(recorded_spec("rollout_set", rollout_set, run.specs, run.lake).values, "agent.tokenizer")
        of_student = decode if tokenizer == run.spec.base.tokenizer else None
        collected = first_prompts(
            "collected", run.lake, Ref("raw_rollouts", "rollout_set", rollout_set), rollout_id, of_student
        )
    served: list[Prompt] = []
    if tables.eval_rollouts.num_rows:
        rollout_id = tables.eval_rollouts["rollout_id"][tables.eval_rollouts.num_rows - 1].as_py()
        served = first_prompts("served", run.lake, Ref("eval_rollouts", "experiment", run.key), rollout_id, decode)
    return [*collected, *served]


def _version(manifest: Manifest) -> str:
    """Format a data version, with a note if a person has accepted a code change since."""
    note = accepted(manifest)
    return f"{manifest.version} ({note})" if note else manifest.version


def _as_markdown(markdown: str) -> dg.MarkdownMetadataValue:
    """Mark a text as markdown, so that Dagster's web page renders it."""
    return dg.MetadataValue.md(markdown)


_HAVE_IDS = (("raw_rollouts", "rollout_set"), ("upweighted_dataset", "experiment"), ("eval_rollouts", "experiment"))


def _vocabularies(run: AssetRun) -> dict[str, list[str]]:
    """Return the text of every token id, for each tokenizer whose ids were captured or are trained on."""
    specs = [
        (asset, recorded_spec(set_name, key, run.specs, run.lake).values)
        for asset, set_name in _HAVE_IDS
        for key in run.lake.keys(asset, set_name)
        if not _not_applicable(run.lake.current(Ref(asset, set_name, key)))
    ]
    names = {part(spec, "agent.tokenizer") for asset, spec in specs if asset == "raw_rollouts" and not _imported(spec)}
    names |= {part(spec, "base.tokenizer") for asset, spec in specs if asset != "raw_rollouts"}
    texts = {}
    for name in sorted(name for name in names if name):
        try:
            chat = load_chat_format(name, "tiny")  # the text of ids does not depend on the template
        except (OSError, ValueError) as error:
            run.log(f"the view `vocabulary` lacks the tokenizer {name!r}: {error}")
            continue
        texts[chat.name] = [chat.decode([number]) for number in range(chat.vocab_size)]
    return texts


def _imported(spec: Mapping[str, Any]) -> bool:
    return spec.get("kind") == "imported"


def _not_applicable(manifest: Manifest | None) -> bool:
    return manifest is None or "not_applicable" in manifest.notes


def _entries(run: AssetRun) -> list[leaderboard.EvaluatedExperiment]:
    """Return every evaluated experiment of the lake, whether or not its spec is loaded."""
    specs = [recorded_spec("experiment", ref.key, run.specs, run.lake) for ref in run.refs("eval_metrics")]
    return [
        leaderboard.EvaluatedExperiment(
            spec.name, spec.title, run.read("eval_metrics", "metrics", spec.name), spec.state
        )
        for spec in specs
    ]


def _evaluated_specs(run: AssetRun) -> dict[str, ExperimentSpec]:
    """Return the specs of the evaluated experiments of the lake, without those that this version cannot parse."""
    specs = [recorded_spec("experiment", ref.key, run.specs, run.lake) for ref in run.refs("eval_metrics")]
    models = {spec.name: parsed("experiment", spec) for spec in specs}
    return {name: model for name, model in models.items() if isinstance(model, ExperimentSpec)}


def _teacher_data(run: AssetRun, experiment: str, spec: ExperimentSpec) -> leaderboard.TeacherData | None:
    """Return what the experiment's student was trained on; None if the lake no longer has all of it."""
    scored = {ref.key for ref in run.refs("scored_rollouts")}
    if experiment not in {ref.key for ref in run.refs("selected_trajectories")} or not scored.issuperset(
        spec.rollout_sets
    ):
        return None
    selected = run.read("selected_trajectories", "selected", experiment)
    filtered = {name.removesuffix("_published") for name in spec.select.require}
    if any("reward >=" in rule for rule in selected["rule"].unique().to_pylist()):
        # Solving a task requires touching its files, so a filter on the reward also filters follow_through.
        filtered |= {"solved", "follow_through"}
    scores = [run.read("scored_rollouts", "scores", name) for name in spec.rollout_sets]
    return leaderboard.TeacherData(
        scores=pa.concat_tables([empty("scores"), *scores]),
        selected=frozenset(selected["rollout_id"].to_pylist()),
        teachers=sorted({teacher or "unknown" for teacher in selected["teacher"].to_pylist()}),
        filtered_on=frozenset(filtered),
    )


def _trained(run: AssetRun) -> pa.Table:
    """Read the fine-tuned checkpoints, then the reinforced ones."""
    return pa.concat_tables([run.read(asset, "checkpoints") for asset in ("sft_checkpoint", "rl_checkpoint")])


def _write(run: AssetRun, name: str, kind: str, text: str) -> dict:
    """Write a report atomically to reports/<experiment>/<name>; return its row of `reports`."""
    folder = run.lake.root / "reports" / run.key
    folder.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    staging = folder / f".{name}.{os.getpid()}"
    staging.write_bytes(data)
    os.replace(staging, folder / name)
    path = Path("reports") / run.key / name
    return {
        "experiment": run.key,
        "kind": kind,
        "path": str(path),
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
    }


ASSETS = [experiment_report, model_card_asset, leaderboard_asset, teacher_ceiling, catalog_asset]
