"""Judge the report of a machine: each fault with its remedy, and notes, which stop nothing; and print them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from etpi.doctor.machine import MachineReport
from etpi.run.columns import aligned

FREE_GB = 2.0


@dataclass(frozen=True)
class Finding:
    """A fault of a machine, or a note about it."""

    node: str
    column: str
    what: str
    remedy: str
    fault: bool = True


def little_space(report: MachineReport) -> Iterator[Finding]:
    """Yield a note for each folder with little free space."""
    for place, free in report.free_gb.items():
        if free < FREE_GB:
            what = f"{free:g} GB are free in the folder of {'the lake' if place == 'lake' else 'its own files'}"
            yield Finding(report.name, "lake", what, "free space there: etpi gc (docs/lake.md)", fault=False)


def unguarded(report: MachineReport) -> Iterator[Finding]:
    """Yield a note for each page of Dagster that anybody can drive."""
    for process in report.unguarded:
        what = f"{process} serves Dagster's page unguarded: a website in your browser can launch runs and read it"
        yield Finding(report.name, "page", what, "stop it, or `dagster dev`, and use `etpi ui`", fault=False)


def table(
    title: str, columns: Sequence[str], facts: Mapping[str, Mapping[str, str]], findings: Sequence[Finding]
) -> str:
    """Return the table of machines: `facts` has, for each, texts of columns; another column reads "ok"."""

    def cell(name: str, column: str, text: str) -> str:
        of_cell = [finding for finding in findings if finding.node == name and finding.column == column]
        if any(finding.fault for finding in of_cell):
            return "FAULT"
        return text + (" (note)" if of_cell else "")

    rows = [
        [name, *(cell(name, column, texts.get(column, "ok")) for column in columns)] for name, texts in facts.items()
    ]
    return aligned([[title, *columns], *rows])


def show(findings: Sequence[Finding], examined: str) -> int:
    """Print findings with their remedies; return the exit status."""
    faults = [finding for finding in findings if finding.fault]
    for finding in findings:
        label, remedy = "FAULT" if finding.fault else "note", finding.remedy.replace("\n", "\n       ")
        print(f"\n{label}  {finding.node}, {finding.column}: {finding.what}\n       {remedy}")
    print(f"\n{examined}: {len(faults)} faults, {len(findings) - len(faults)} notes")
    return 1 if faults else 0
