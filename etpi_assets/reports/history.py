"""The page of experiments that others have published: what each changed, their figures, the checks that answer it.

Belongs here: `docs/history.md`, made from the specs alone. Does not belong here: our own figures (`results`).

    python -m etpi_assets.reports.history docs/history.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs, load_specs
from etpi_assets.specs.published import Published, figures

METRICS = ("plan_first", "plan_content", "follow_through")

_HEAD = """# Experiments of the plan-first report

Eleven result rows and their sub-iterations, found there over five days by hand. Each is a spec of full size here
(`requires = "gpu"`) that carries the published figures; ours stand beside them in its report once it has run. The last
column names the checks that stop the fault, most of them before a GPU is rented. Two evaluated pairs decide nothing:
where counts are given, the report and the leaderboard put an interval to them.

This page is made from the specs by `python -m etpi_assets.reports.history docs/history.md`.

| published as | spec | plan_first | plan_content | follow_through | what went wrong | answered by |
|---|---|---|---|---|---|---|
"""

_TEACHERS = """
## Teachers

A student cannot be better than what it is shown, so the report scored each teacher first, as `teacher_gate` does here.

| teacher | rollouts | plan_first | plan_content | follow_through | read as | students |
|---|---|---|---|---|---|---|
"""

_NOTES = "\n## Readings\n\nWhat the report leaves open or says in two ways, spec by spec.\n"


def page(specs: Specs) -> str:
    """The page, of every experiment whose spec names a published fault, in the order they were published in."""
    chosen = {name: spec for name, spec in specs.experiments.items() if "fault" in spec.published}
    order = sorted(chosen, key=lambda name: (chosen[name].published["date"], *_place(chosen[name].published["source"])))
    rows = "".join(_row(name, chosen[name]) for name in order)
    notes = "".join(f"\n- `{name}`: {' '.join(chosen[name].notes.split())}" for name in order)
    # Tags that a text speaks of are text here.
    return f"{_HEAD}{rows}{_TEACHERS}{_teachers({name: chosen[name] for name in order})}{_NOTES}{notes}\n".replace(
        "<", "&lt;"
    )


def _teachers(chosen: Mapping[str, ExperimentSpec]) -> str:
    """A row a teacher, in the order they were first learnt from."""
    said: dict[str, dict[str, Any]] = {}
    students: dict[str, list[str]] = {}
    for name, spec in chosen.items():
        if teacher := spec.published.get("teacher"):
            said.setdefault(teacher["name"], {}).update(teacher)
            students.setdefault(teacher["name"], []).append(f"`{name}`")
    return "".join(
        f"| {name} | {facts.get('rollouts', 'not given')} | {' | '.join(f'{facts[metric]:.1%}' for metric in METRICS)} "
        f"| {facts.get('reading', '')} | {', '.join(students[name])} |\n"
        for name, facts in said.items()
    )


def _place(source: str) -> tuple[str, int, str]:
    """Where a source stands in its report: phase, then the number of the iteration or, outside phases, of the row."""
    phase = re.search(r"Phase (\w) v(\d+)(\w?)", source)
    row = re.search(r"row (\d+)", source)
    return (phase[1], int(phase[2]), phase[3]) if phase else ("", int(row[1]) if row else 0, "")


def _row(name: str, spec: ExperimentSpec) -> str:
    found = {figure.metric: figure for figure in figures(spec.published)}
    cells = [
        f"{spec.published['source'].rpartition(', ')[2]}, {spec.published['date']}",
        f"`{name}`",
        *(_figure(found.get(metric)) for metric in METRICS),
        f"{spec.published['fault']}. {spec.published.get('note', '')}".strip(),
        _checks(spec.published),
    ]
    return f"| {' | '.join(cells)} |\n"


def _figure(figure: Published | None) -> str:
    if figure is None:
        return "not given"
    count = f" ({figure.hits}/{figure.n})" if figure.n else ""
    return f"{figure.value:.0%}{count}"


def _checks(published: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in published.get("answered_by", ()))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(load_specs()))
