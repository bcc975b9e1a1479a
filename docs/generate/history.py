"""docs/reference/history.md: published experiments, their figures and faults, and the checks that stop each fault.

The page is generated from the specs alone; the lab repeats faults and repairs in miniature (lab/docs/history.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from etpi_assets.reports.facts import Published, published_figures
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_resources.lake.check_outcome import percent

METRICS = ("plan_first", "plan_content", "follow_through")


_HEAD = """# Experiments of the plan-first report

The published report has eleven result rows with sub-iterations, run by hand over five days. Each is a full-size spec
here (`requires = "gpu"`) that carries the published figures; after a run, the experiment's report shows ours beside
them. The last column names the checks that stop the fault, most of them before a GPU is rented. Two evaluated pairs
prove little, so our report adds an interval to published counts. Where the published report is
ambiguous, `notes` and `published.faults` of the spec say how we read it; an experiment's report shows the notes.

Generated from the specs by `make docs`; do not edit.

| published as | spec | plan_first | plan_content | follow_through | what went wrong | stopped by |
|---|---|---|---|---|---|---|
"""

_TEACHERS = """
## Teachers

A student is limited by its training data, so the published report scored each teacher first, as `teacher_gate` does
here.

| teacher | rollouts | plan_first | plan_content | follow_through | interpretation | students |
|---|---|---|---|---|---|---|
"""


def page(specs: Specs) -> str:
    """Write the page: every experiment whose spec names a published fault, in the order of publication."""
    chosen = {name: spec for name, spec in specs.experiments.items() if "fault" in spec.published}
    order = sorted(chosen, key=lambda name: (chosen[name].published["date"], *_place(chosen[name].published["source"])))
    rows = "".join(_row(name, chosen[name]) for name in order)
    # Texts mention tags such as <think>; markdown must not read them as HTML.
    teachers = _teachers({name: chosen[name] for name in order})
    return f"{_HEAD}{rows}{_TEACHERS}{teachers}".replace("<", "&lt;")


def _teachers(chosen: Mapping[str, ExperimentSpec]) -> str:
    """Format a row per teacher, in the order of their first students."""
    facts_of: dict[str, dict[str, Any]] = {}
    students: dict[str, list[str]] = {}
    for name, spec in chosen.items():
        if teacher := spec.published.get("teacher"):
            facts_of.setdefault(teacher["name"], {}).update(teacher)
            students.setdefault(teacher["name"], []).append(f"`{name}`")
    return "".join(
        f"| {name} | {facts.get('rollouts', 'not given')} "
        f"| {' | '.join(percent(facts[metric], 1) for metric in METRICS)} "
        f"| {facts.get('reading', '')} | {', '.join(students[name])} |\n"
        for name, facts in facts_of.items()
    )


def _place(source: str) -> tuple[str, int, str]:
    """Return a source's place in the published report: phase, then the number of the iteration or row."""
    phase = re.search(r"Phase (\w) v(\d+)(\w?)", source)
    row = re.search(r"row (\d+)", source)
    return (phase[1], int(phase[2]), phase[3]) if phase else ("", int(row[1]) if row else 0, "")


def _row(name: str, spec: ExperimentSpec) -> str:
    published = {figure.metric: figure for figure in published_figures(spec.published)}
    cells = [
        f"{spec.published['source'].rpartition(', ')[2]}, {spec.published['date']}",
        f"`{name}`",
        *(_figure(published.get(metric)) for metric in METRICS),
        f"{spec.published['fault']}. {spec.published.get('note', '')}".strip(),
        _checks(spec.published),
    ]
    return f"| {' | '.join(cells)} |\n"


def _figure(figure: Published | None) -> str:
    if figure is None:
        return "not given"
    count = f" ({figure.hits}/{figure.n})" if figure.n else ""
    return f"{percent(figure.value)}{count}"


def _checks(published: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in published.get("answered_by", ()))
