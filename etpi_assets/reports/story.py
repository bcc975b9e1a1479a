"""The sentences at the head of a report: what happened, good or bad. `changes.RULES` judges, this module orders.

A sentence is (tone, text): tone is bad, good or empty. The first sentences say what became of the main metric, the next
one why; then follow the other metrics, drops before gains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etpi_assets.reports.changes import OUTCOME, Change, roles, summary
from etpi_assets.reports.facts import ReportTables, percent

Sentence = tuple[str, str]


def sentences(
    split: str,
    main: str,
    why: str,
    tables: ReportTables,
    headline: Sequence[Mapping[str, Any]],
    paired: Sequence[Change],
    verdicts: Sequence[Mapping[str, Any]],
    checks: Sequence[Mapping[str, Any]],
) -> list[Sentence]:
    """Return the sentences of a report.

    Args:
        split: of the evaluation's tasks.
        main: the main metric.
        why: the sentence about verdicts (`answer.why`).
        headline: the pooled headline metrics.
        paired: changes of these metrics between the evaluated roles.
        verdicts: comparisons with thresholds, each with its `word`.
        checks: check outcomes.
    """
    evaluated = bool(tables.eval_rollouts.num_rows)
    sentences = compared(split, paired, main, why) if evaluated else _not_evaluated(tables, headline)
    below = [
        f"`{v['metric']}` of {v['checkpoint_role']}, {v['decoding']}" for v in verdicts if v["word"][:5] == "below"
    ]
    if below:
        sentences.append(("bad", f"Below the threshold: {', '.join(below)}."))
    sentences += [
        ("bad", f"`{check['name']}` failed and is overridden: {check['overridden']['reason']}")
        for check in checks
        if check.get("overridden")
    ]
    for tone, verb, blocking in (("bad", "failed", True), ("", "warned", False)):
        failed = [f"`{c['name']}`" for c in checks if not c["passed"] and c["blocking"] is blocking]
        if failed:
            sentences.append((tone, f"{len(failed)} check{'s'[: len(failed) != 1]} {verb}: {', '.join(failed)}."))
    return sentences


def compared(split: str, paired: Sequence[Change], main: str, why: str) -> list[Sentence]:
    """Return the sentences about an evaluation: the differences of the last checkpoint from the first, and why."""
    outcome, beside = summary(paired, main)
    if roles(paired) is None:
        outcome = [("", "One checkpoint was evaluated, so there is nothing to compare it with.")]
    elif not outcome:
        outcome = [("", f"`{main}` was not measured of two checkpoints.")]
    sentences = [*outcome, ("", why), *beside]
    if split != "heldout":
        sentences.append(("bad", f"The evaluation's tasks are of the split {split}: none of its figures is held out."))
    return sentences


def results_title(split: str, evaluated: bool) -> str:
    """Return the heading of the results: held-out only if they are."""
    if not evaluated:
        return "Not evaluated"
    return "Held-out results" if split == "heldout" else f"Results on tasks of the split {split}, not held out"


def _not_evaluated(tables: ReportTables, headline: Sequence[Mapping[str, Any]]) -> list[Sentence]:
    trained = [row for row in tables.checkpoints["role"].to_pylist() if row != "base"]
    what = "A student was trained and not evaluated" if trained else "Nothing was trained or evaluated"
    rows = tables.dataset_rows.num_rows
    data = (
        f"the result is a data set of {rows:,} rows, of {tables.selected.num_rows:,} selected rollouts"
        if rows
        else "there is no data set"
    )
    sentences: list[Sentence] = [("", f"{what}; {data}. No figure in this report is held out.")]
    sentences += [
        ("", f"Of the rollouts that the data were selected from, {percent(row)} solved their task: the teacher's rate.")
        for row in headline
        if (row["checkpoint_role"], row["metric"]) == ("teacher", OUTCOME)
    ]
    return sentences
