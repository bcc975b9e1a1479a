"""The assets of the reports stage: experiment_report, model_card, leaderboard, teacher_ceiling and catalog."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, Literal

import pyarrow as pa

from etpi_assets.asset import AssetRun, Input, Markdown, Produced, asset
from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import other_packages
from etpi_assets.reports import facts, html
from etpi_assets.reports import leaderboard as boards
from etpi_assets.reports import model_card as cards
from etpi_assets.reports.changes import STORED, changes, changes_table
from etpi_assets.reports.tainted import checkpoint_lines, tainted
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs, part
from etpi_resources.chat.sources import token_texts
from etpi_resources.lake import catalog as catalog_file
from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.lake import Lake, Manifest, Ref
from etpi_resources.lake.schemas import empty, from_rows


@asset(
    set="experiment",
    group="reports",
    tables=("reports", "changes"),
    sections=("*", "rollout_sets.license"),
    kinds=("html", "markdown"),
    versions=("reports",),
    across_seams=True,
    summary="The experiment's report: one self-contained HTML page, and its results in markdown.",
)
def experiment_report(
    run: AssetRun,
    eval_metrics: Input,
    eval_rollouts: Input,
    sft_checkpoint: Input,
    rl_checkpoint: Input,
    serving_probe: Input,
    upweighted_dataset: Input,
    tito_pairs: Input,
    selected_trajectories: Input,
    raw_rollouts: Input,
    tasks: Input,
) -> Produced:
    tables = _tables(run)
    page, summary = html.render(_reported(run), tables)
    rows = [_write(run, "report.html", "html", page), _write(run, "report.md", "markdown", summary)]
    paired = changes(tables.eval_rollouts, tables.eval_scores, tables.eval_agent_scores, STORED)
    return Produced(
        tables={"reports": from_rows("reports", rows), "changes": changes_table(run.key, paired)},
        metadata={"report": run.lake.root / rows[0]["path"], "summary": Markdown(summary)},
    )


@asset(
    set="experiment",
    group="reports",
    tables=("reports",),
    sections=("*", "rollout_sets.license"),
    kinds=("markdown",),
    versions=("model_card",),
    across_seams=True,
    summary="A model card in the format of the Hugging Face hub.",
)
def model_card(
    run: AssetRun,
    eval_metrics: Input,
    eval_rollouts: Input,
    sft_checkpoint: Input,
    rl_checkpoint: Input,
    upweighted_dataset: Input,
    base_checkpoint: Input,
    tasks: Input,
) -> Produced:
    card = cards.render(_reported(run), _tables(run), base_checkpoint.read("checkpoints"))
    return Produced(
        tables={"reports": from_rows("reports", [_write(run, "README.md", "model_card", card)])},
        metadata={"card": Markdown(card)},
    )


@asset(
    set="all",
    group="reports",
    tables=("leaderboard",),
    sections=("title",),
    lock="reports",
    versions=("reports",),
    summary="The metrics of all experiments of the lake side by side.",
)
def leaderboard(run: AssetRun, eval_metrics: Input, experiment_spec: Input) -> Produced:
    entries = _entries(run, eval_metrics)
    rows = tainted(run.lake, [entry.experiment for entry in entries])
    finals = [row for row in rows if row["kind"] == "checkpoint" and row["final"]]
    shares = {(row["experiment"], row["role"]): row["share"] for row in sorted(finals, key=lambda row: row["share"])}
    table = boards.leaderboard(entries, shares)
    return Produced(tables={"leaderboard": table}, metadata={"board": Markdown(boards.board(table))})


@asset(
    set="all",
    group="reports",
    tables=("teacher_ceiling",),
    sections=("title", "rollout_sets", "select"),
    lock="reports",
    versions=("reports",),
    summary="The teacher's metrics next to the student's: a student is bounded by its teacher.",
)
def teacher_ceiling(
    run: AssetRun, eval_metrics: Input, scored_rollouts: Input, selected_trajectories: Input, experiment_spec: Input
) -> Produced:
    entries = _entries(run, eval_metrics)
    teachers = {
        name: _teacher_data(scored_rollouts, selected_trajectories, name, spec)
        for name, spec in _evaluated_specs(run, eval_metrics).items()
    }
    table = boards.teacher_ceiling(entries, {name: data for name, data in teachers.items() if data})
    return Produced(tables={"teacher_ceiling": table}, metadata={"board": Markdown(boards.ceiling_board(table))})


@asset(
    set="all",
    group="reports",
    lock="reports",
    kinds=("duckdb",),
    summary="The DuckDB file, with a view of every current table. It is rebuilt each time from the whole lake.",
)
def catalog(run: AssetRun) -> Produced:
    path = catalog_file.build(run.lake, GRAPH.values(), vocabularies=_vocabularies(run))
    return Produced(
        tables={},
        checks=catalog_file.verify(path),
        metadata={"file": path, "ask": f"duckdb -readonly {path} < sql/reports/failed_checks.sql"},
    )


def _version(manifest: Manifest) -> str:
    """Format a data version, with the packages that made it if other versions are installed."""
    note = other_packages(manifest)
    return f"{manifest.version} ({note})" if note else manifest.version


_HAVE_IDS = (("raw_rollouts", "rollout_set"), ("upweighted_dataset", "experiment"), ("eval_rollouts", "experiment"))


def _vocabularies(run: AssetRun) -> dict[str, list[str]]:
    """Return the text of every token id, for each tokenizer whose ids were captured or are trained on."""
    specs = [
        (asset, recorded_spec(set_name, key, run.specs, run.lake)[0])
        for asset, set_name in _HAVE_IDS
        for key in run.lake.keys(asset, set_name)
        if (manifest := run.lake.current(Ref(asset, set_name, key))) and "not_applicable" not in manifest.notes
    ]
    captured = [spec for asset, spec in specs if asset == "raw_rollouts" and spec.get("kind") != "imported"]
    names = {part(spec, "agent.tokenizer") for spec in captured}
    names |= {part(spec, "base.tokenizer") for asset, spec in specs if asset != "raw_rollouts"}
    texts = {}
    for name in sorted(name for name in names if name):
        try:
            texts[name] = token_texts(name)
        except (OSError, ValueError) as error:
            run.log(f"the view `vocabulary` lacks the tokenizer {name!r}: {error}")
    return texts


def _entries(run: AssetRun, eval_metrics: Input) -> list[boards.EvaluatedExperiment]:
    """Return every evaluated experiment of the lake, whether or not its spec is loaded."""
    entries = []
    for ref in eval_metrics.refs():
        values, state = recorded_spec("experiment", ref.key, run.specs, run.lake)
        title = values.get("title") or ref.key
        entries.append(boards.EvaluatedExperiment(ref.key, title, eval_metrics.read("metrics", ref.key), state))
    return entries


def _evaluated_specs(run: AssetRun, eval_metrics: Input) -> dict[str, ExperimentSpec]:
    """Return the specs of the evaluated experiments of the lake, without those that this version cannot parse."""
    specs = {}
    for ref in eval_metrics.refs():
        values, _ = recorded_spec("experiment", ref.key, run.specs, run.lake)
        with suppress(ValueError):  # recorded under keys that this version of etpi does not know
            specs[ref.key] = ExperimentSpec.model_validate(values)
    return specs


def _teacher_data(
    scored_rollouts: Input, selected_trajectories: Input, experiment: str, spec: ExperimentSpec
) -> boards.TeacherData | None:
    """Return the training data of the experiment's student; None if the lake no longer has all of it."""
    scored = {ref.key for ref in scored_rollouts.refs()}
    if experiment not in {ref.key for ref in selected_trajectories.refs()} or not scored.issuperset(spec.rollout_sets):
        return None
    selected = selected_trajectories.read("selected", experiment)
    filtered = {name.removesuffix("_published") for name in spec.select.require}
    if any("reward >=" in rule for rule in selected["rule"].unique().to_pylist()):
        # Solving a task requires touching its files, so a filter on the reward also filters follow_through.
        filtered |= {"solved", "follow_through"}
    scores = [scored_rollouts.read("scores", name) for name in spec.rollout_sets]
    return boards.TeacherData(
        scores=pa.concat_tables([empty("scores"), *scores]),
        selected=frozenset(selected["rollout_id"].to_pylist()),
        teachers=sorted({teacher or "unknown" for teacher in selected["teacher"].to_pylist()}),
        filtered_on=frozenset(filtered),
    )


def _tables(run: AssetRun) -> facts.ReportTables:
    """Read the tables of the assets that an asset reads; those of others are empty."""

    def read(table: str, assets: Sequence[str], columns: Sequence[str] | None) -> pa.Table:
        parts = [run.read(asset, table, columns=columns) for asset in assets if asset in run.node.upstream]
        return pa.concat_tables(parts) if parts else empty(table)

    return facts.ReportTables(**{field.name: read(**field.metadata) for field in fields(facts.ReportTables)})


def _reported(run: AssetRun) -> html.ReportedExperiment:
    manifests = {ref: run.lake.require(ref) for asset in run.node.upstream for ref in run.refs(asset)}
    return html.ReportedExperiment(
        name=run.key,
        spec=run.spec,
        inputs={str(ref): _version(manifest) for ref, manifest in manifests.items()},
        checks=[{**check, "asset": ref.asset} for ref, manifest in manifests.items() for check in manifest.checks],
        rollout_sets=run.specs.rollout_sets,
        tainted=_remarks(run),
    )


def _remarks(run: AssetRun) -> list[str]:
    """Return sentences on what figures rest on: verdicts that flipped, and data that are newer than the training."""
    current = run.lake.current(Ref("upweighted_dataset", "experiment", run.key))
    trained = {row["dataset_version"] for row in run.read("sft_checkpoint", "checkpoints").to_pylist() if row["final"]}
    newer = current and trained - {None, current.version}
    remark = f"figures of data are of a newer data set than the training's; mend: etpi run {run.key} --rebuild"
    return [*checkpoint_lines(tainted(run.lake, [run.key])), *[remark] * bool(newer)]


def _write(run: AssetRun, name: str, kind: str, text: str) -> dict:
    """Write a report to reports/<experiment>/<name>; return its row of `reports`."""
    path, data = f"reports/{run.key}/{name}", text.encode()
    write_atomically(run.lake.root / path, data)
    digest = hashlib.sha256(data).hexdigest()
    return {"experiment": run.key, "kind": kind, "path": path, "sha256": digest, "bytes": len(data)}


SpecState = Literal["loaded", "invalid", "missing"]


def recorded_spec(set: str, name: str, specs: Specs, lake: Lake) -> tuple[Mapping[str, Any], SpecState]:
    """Return the resolved spec of a suite, a rollout set or an experiment, and whether the loaded specs have it.

    It is the loaded one as JSON values, else the one that the lake recorded; empty if it was never recorded.
    """
    state: SpecState = "missing"
    if name in specs.keys(set):
        if (spec := specs.entry(set, name).spec) is not None:
            return spec.model_dump(mode="json"), "loaded"
        state = "invalid"
    ref = Ref(f"{set}_spec", set, name)
    rows = lake.read(ref, "specs", ["spec"]).to_pylist() if lake.current(ref) else []
    return json.loads(rows[0]["spec"]) if rows else {}, state
