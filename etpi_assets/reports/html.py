"""Render the experiment report as a self-contained HTML page, and its summary as markdown.

`facts` computes the figures, `etpi_resources.charts` draws the charts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from markupsafe import Markup, escape

from etpi_assets.curation.merge import merge_savings
from etpi_assets.curation.upweight import loss_by_turn, shares
from etpi_assets.reports import answer, changes, facts, story
from etpi_assets.reports.answer import REASONS
from etpi_assets.reports.facts import ReportTables
from etpi_assets.scoring.intervals import clears, wilson
from etpi_assets.scoring.published import in_reading
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_resources import charts
from etpi_resources.hidden import with_hidden
from etpi_resources.links import (
    REPORTED_VIEW,
    dataset_page,
    experiment_page,
    regressions_page,
    rollouts_page,
)
from etpi_resources.templates import templates

TEMPLATES = templates(
    Path(__file__).with_name("templates"),
    percent=facts.percent,
    figure=facts.figure,
    points=changes.points,
    code=lambda text: Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", str(escape(text)))),
)

_REINFORCED = ("newly_parsed", "parse_lost", "newly_solved", "newly_lost")
"""Changes of a task by reinforcement; its page counts tasks over decodings and seeds."""
_WORDS = {True: "clears the threshold", False: "below the threshold", None: "undecided at this n"}


@dataclass(frozen=True)
class ReportedExperiment:
    """The experiment that a report describes.

    Attributes:
        inputs: "asset/key" -> data version of every input.
        checks: check outcomes as JSON, each with its "asset".
        rollout_sets: name -> spec of every loaded rollout set.
        tainted: sentences about checkpoints that rest on verdicts that flipped.
    """

    name: str
    spec: ExperimentSpec
    inputs: Mapping[str, str]
    checks: Sequence[Mapping[str, Any]]
    rollout_sets: Mapping[str, RolloutSetSpec] = field(default_factory=dict)
    tainted: Sequence[str] = ()

    @property
    def main(self) -> str:
        """Return the main metric, in the spec's reading."""
        return in_reading(self.spec.metrics.main, self.spec.metrics.reading)

    @property
    def thresholds(self) -> dict[str, float]:
        """Return metric -> the rate it has to reach, in the spec's reading."""
        metrics = self.spec.metrics
        return {in_reading(name, metrics.reading): rate for name, rate in metrics.thresholds.items()}

    @property
    def split(self) -> str:
        """Return the split of the evaluation's tasks: heldout or train."""
        return self.spec.evaluate.split if self.spec.evaluate else "heldout"


def render(experiment: ReportedExperiment, tables: ReportTables) -> tuple[str, str]:
    """Render a report as (HTML, markdown summary). The page loads nothing and needs no script."""
    spec = experiment.spec
    names = facts.headline_metrics(spec.metrics.reading, spec.metrics.headline)
    headline = facts.metric_rows(tables.metrics, names)
    measured = [row for row in headline if row["checkpoint_role"] != "teacher"]
    evaluated = {
        "rollouts": tables.eval_rollouts, "scores": tables.eval_scores, "agent_scores": tables.eval_agent_scores,
    }  # fmt: skip
    reinforced = facts.run_query(
        "reports/changed_by_reinforcement.sql", evaluated, {"turns": tables.eval_turns, "tasks": tables.tasks}
    )
    rates = [name for name in names if name not in facts.MEANS]
    paired = changes.changes(tables.eval_rollouts, tables.eval_scores, tables.eval_agent_scores, rates)
    verdicts = _verdicts(headline, experiment.thresholds, paired)
    failed = facts.run_query("reports/failures.sql", {name: evaluated[name] for name in ("rollouts", "scores")}, {})
    role = answer.last_role(tables.eval_rollouts["checkpoint_role"].to_pylist())
    teachers = tables.rollouts["outcome"].to_pylist() if "outcome" in tables.rollouts.column_names else []
    ended = answer.verdicts_of(tables.eval_scores, tables.eval_rollouts, role)
    why = answer.why(role, ended, answer.verdicts_of_outcomes(teachers)) if role else ""
    table = _by_condition(headline)
    lead = {experiment.main, *facts.leading_metrics(spec.metrics.model_dump())}
    values = {
        "experiment": experiment,
        "story": story.sentences(
            experiment.split, experiment.main, why, tables, headline, paired, verdicts, experiment.checks
        ),
        "tone": changes.tone_of(changes.summary(paired, experiment.main)[0]),
        "example": answer.example(experiment.name, tables.eval_rollouts, tables.eval_scores, tables.eval_turns),
        "results_title": story.results_title(experiment.split, bool(measured)),
        "evaluated": bool(measured),
        "table": table,
        "lead": lead,
        "parts": [
            [row for row in table["rows"] if (row[0] in lead) is leads] for leads in (True, False)
        ],
        "paired": paired,
        "rules": changes.RULES,
        "failure_kinds": failure_kinds(failed, tables.eval_rollouts, experiment.name),
        "links": view_links(experiment.name),
        "detail": facts.metric_rows(
            tables.metrics, [name for name in facts.detail_metrics(spec.metrics.reading) if name not in names]
        ),
        "per_seed": [row for seed in spec.seeds for row in facts.metric_rows(tables.metrics, names, seed)],
        "verdicts": verdicts,
        "published": _published(facts.published_figures(spec.published), tables.metrics),
        "published_source": ". ".join(
            str(spec.published[k]) for k in ("source", "date", "note") if k in spec.published
        ),
        "sources": facts.sources(
            spec.rollout_sets, experiment.rollout_sets, tables.tasks, tables.selected,
            tables.dataset_rows,
        ),
        "split": facts.split(tables.dataset_rows),
        "funnel": facts.funnel(tables),
        "drops": facts.drops(tables),
        "tokens": merge_savings(tables.dataset_rows, tables.pairs, tables.sequences),
        "probes": tables.probes.to_pylist(),
        "checkpoints": tables.checkpoints.to_pylist(),
        "cost": facts.cost(tables),
        "sft_plots": _curves(tables.training_log, "sft"),
        "rl_plots": _curves(tables.rl_log, "rl"),
        "changed": reinforced,
        "changes": [(kind.replace("_", " "), sum(bool(row[kind]) for row in reinforced)) for kind in _REINFORCED],
        "share_plot": charts.bars(
            "Share of the loss by turn",
            [(f"turn {t}", 100 * s) for t, s in list(shares(loss_by_turn(tables.dataset_rows)).items())[:16]],
            " %",
        ),
    }  # fmt: skip
    return (
        with_hidden(TEMPLATES.get_template("report.html.jinja").render(**values)),
        with_hidden(TEMPLATES.get_template("summary.md.jinja").render(**values)),
    )


def _curves(log: pa.Table, role: str) -> list[tuple[str, str]]:
    """Return (title, chart) of the figures that a training recorded."""
    return [
        (title, charts.line_chart(title, series, "optimiser step", log_y=title == "Loss"))
        for title, series in facts.training_curves(log, role)
    ]


def _by_condition(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the roles, and for each metric its rows of (decoding, one cell for each role).

    A teacher has one decoding, that of its rollout sets; it is shown with the first decoding of the others.
    """
    roles = [role for role in facts.ROLE_ORDER if any(row["checkpoint_role"] == role for row in rows)]
    cells = {(r["metric"], r["checkpoint_role"], r["decoding"]): r for r in rows}
    decodings = sorted({r["decoding"] for r in rows if r["checkpoint_role"] != "teacher"})
    teachers = sorted({r["decoding"] for r in rows if r["checkpoint_role"] == "teacher"})
    lines = []
    for name in dict.fromkeys(r["metric"] for r in rows):
        for number, decoding in enumerate(decodings or teachers):
            under = dict.fromkeys(roles, decoding)
            if "teacher" in under:
                under["teacher"] = teachers[0] if number == 0 else ""
            line = [cells.get((name, role, under[role])) for role in roles]
            if any(line):
                lines.append((name, decoding, line))
    return {"roles": roles, "rows": lines}


def _published(stated: Sequence[facts.Published], metrics: pa.Table) -> list[dict[str, Any]]:
    """Return each published figure with the interval of its counts, and our trained checkpoints', in its reading."""
    rows_of_table = []
    for figure in stated:
        interval = wilson(figure.hits, figure.n) if figure.hits is not None and figure.n else None
        rows = facts.metric_rows(metrics, [in_reading(figure.metric, "published")])
        ours = [row for row in rows if row["checkpoint_role"] in ("sft", "rl")]
        rows_of_table.append({"figure": figure, "interval": interval, "ours": ours})
    return rows_of_table


def _verdicts(
    rows: Sequence[Mapping[str, Any]], thresholds: Mapping[str, float], paired: Sequence[changes.Change]
) -> list[dict[str, Any]]:
    """Compare the trained roles' rates with their thresholds; beside each its change since the first role, if worse."""
    first = {(c.metric, c.decoding, c.after): c for c in reversed(paired)}
    verdicts = []
    for row in rows:
        if row["metric"] in thresholds and row["checkpoint_role"] in ("sft", "rl"):
            threshold = thresholds[row["metric"]]
            change = first.get((row["metric"], row["decoding"], row["checkpoint_role"]))
            worse = f"but {change.word} since {change.before}" if change and change.word in ("fell", "lower") else ""
            word = _WORDS[clears(row["ci_low"], row["ci_high"], threshold)]
            verdicts.append({**row, "threshold": threshold, "word": word, "worse": worse})
    return verdicts


_ROLES = ("rl", "sft", "base")


def failure_kinds(rows: Sequence[Mapping[str, Any]], rollouts: pa.Table, experiment: str) -> list[dict[str, Any]]:
    """Count failures by checkpoint, decoding, verdict and exit status, most frequent first within a checkpoint.

    Args:
        rows: those of sql/reports/failures.sql.

    Returns:
        role, decoding, verdict, exit_status, count; `of`: rollouts of the checkpoint under the decoding; reasons: the
        most frequent, each with its count; link: the address of the list of these rollouts.
    """
    evaluated = Counter(
        zip(rollouts["checkpoint_role"].to_pylist(), rollouts["decoding"].to_pylist(), strict=True)
    )  # fmt: skip
    counts: Counter[tuple[str, ...]] = Counter()
    reasons: dict[tuple[str, ...], Counter[str]] = {}
    for row in rows:
        verdict = "infrastructure" if row["infrastructure"] else row["verdict"]
        kind = (row["checkpoint_role"], row["decoding"] or "", verdict, row["exit_status"] or "")
        counts[kind] += 1
        reasons.setdefault(kind, Counter())[_short(row["reason"] or REASONS.get(verdict))] += 1
    failed = []
    for kind in sorted(counts, key=lambda kind: (_ROLES.index(kind[0]), kind[1], -counts[kind], kind[2:])):
        role, decoding, verdict, exit_status = kind
        stated = [(reason, n) for reason, n in reasons[kind].items() if reason]
        chosen = {"role": role, "decoding": decoding or None, "verdict": verdict, "exit": exit_status or None}
        failed.append(
            {
                "role": role, "decoding": decoding, "verdict": verdict, "exit_status": exit_status,
                "count": counts[kind], "of": evaluated[role, decoding or None],
                "reasons": sorted(stated, key=lambda item: (-item[1], item[0]))[:3],
                "link": REPORTED_VIEW + rollouts_page(made_for=experiment, origin="eval", **chosen),
            }
        )  # fmt: skip
    return failed


def view_links(experiment: str) -> dict[str, str]:
    """Return the addresses of an experiment's regressions, training data and page."""
    pages = {"regressions": regressions_page, "dataset": dataset_page, "experiment": experiment_page}
    return {name: REPORTED_VIEW + page(experiment) for name, page in pages.items()}


def _short(reason: str | None, most: int = 160) -> str:
    text = " ".join((reason or "").split())
    return text if len(text) <= most else text[: most - 1] + "…"
