"""The sentences at the head of a report: what happened, good or bad. `changes.RULES` judges, this module orders.

A sentence is (tone, text): tone is bad, good or empty. The first sentence says whether the student is better, worse or
not measured; drops come before gains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etpi_assets.reports.changes import OUTCOME, Change, between, roles, summary
from etpi_assets.reports.facts import ReportTables, percent

Sentence = tuple[str, str]

ROLES = {"base": "the base", "sft": "the fine-tuned checkpoint (sft)", "rl": "the reinforced checkpoint (rl)"}

_UNDECIDED = "which is undecided at this n"
HEADS = (
    (lambda fell, lower, improved: fell and improved, "bad",
     "{after} is worse than {before} in {fell} and better in {improved}."),
    (lambda fell, lower, improved: fell, "bad",
     "{after} is worse than {before} in {fell} and better in nothing."),
    (lambda fell, lower, improved: improved and lower, "",
     f"{{after}} is better than {{before}} in {{improved}}; {{lower}} dropped, {_UNDECIDED}."),
    (lambda fell, lower, improved: improved, "good",
     "{after} is better than {before} in {improved}, and lower in nothing."),
    (lambda fell, lower, improved: lower, "bad",
     f"{{after}} is not measurably better than {{before}} in anything; {{lower}} dropped, {_UNDECIDED}."),
    (lambda fell, lower, improved: True, "",
     "No measurable difference between {before} and {after}."),
)  # fmt: skip
"""(condition on the metrics that fell, are lower and improved; tone; sentence). The first that applies is sentences."""


def sentences(
    split: str,
    tables: ReportTables,
    headline: Sequence[Mapping[str, Any]],
    paired: Sequence[Change],
    verdicts: Sequence[Mapping[str, Any]],
    checks: Sequence[Mapping[str, Any]],
) -> list[Sentence]:
    """Return the sentences of a report.

    Args:
        split: of the evaluation's tasks.
        headline: the pooled headline metrics.
        paired: changes of these metrics between the evaluated roles.
        verdicts: comparisons with thresholds, each with its `word`.
        checks: check outcomes.
    """
    evaluated = bool(tables.eval_rollouts.num_rows)
    sentences = compared(split, paired) if evaluated else _not_evaluated(tables, headline)
    below = [
        f"`{v['metric']}` of {v['checkpoint_role']}, {v['decoding']}" for v in verdicts if v["word"][:5] == "below"
    ]
    if below:
        sentences.append(("bad", f"Below the threshold: {', '.join(below)}."))
    failed = [f"`{check['name']}`" for check in checks if not check["passed"]]
    if failed:
        sentences.append(("bad", f"{len(failed)} check{'s'[: len(failed) != 1]} failed: {', '.join(failed)}."))
    return sentences


def compared(split: str, paired: Sequence[Change]) -> list[Sentence]:
    """Return the sentences about an evaluation: the differences of the last checkpoint from the first."""
    pair = roles(paired)
    if pair is None:
        sentences = [("", "One checkpoint was evaluated, so there is nothing to compare it with.")]
    else:
        sentences = [_head(between(paired, *pair), *pair), *summary(paired)]
    if split != "heldout":
        sentences.append(("bad", f"The evaluation's tasks are of the split {split}: none of its figures is held out."))
    return sentences


def results_title(split: str, evaluated: bool) -> str:
    """Return the heading of the results: held-out only if they are."""
    if not evaluated:
        return "Not evaluated"
    return "Held-out results" if split == "heldout" else f"Results on tasks of the split {split}, not held out"


def _head(compared: Sequence[Change], before: str, after: str) -> Sentence:
    def names(*words: str) -> str:
        chosen = [change for change in compared if change.word in words]
        decodings: dict[str, list[str]] = {}
        for change in chosen:
            decodings.setdefault(change.metric, []).append(change.decoding)
        every = {change.decoding for change in compared}
        return ", ".join(
            f"`{metric}`" + ("" if set(under) == every else f" ({', '.join(under)})")
            for metric, under in decodings.items()
        )

    fell, lower, improved = names("fell"), names("lower"), names("improved")
    for applies, tone, sentence in HEADS:
        if applies(fell, lower, improved):
            text = sentence.format(before=ROLES[before], after=ROLES[after], fell=fell, lower=lower, improved=improved)
            return tone, text[0].upper() + text[1:]
    raise AssertionError("the last rule always applies")


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
