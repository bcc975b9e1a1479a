"""Run `etpi doctor`: judge the report of a machine; print faults, and notes, which stop nothing, with remedies."""

from __future__ import annotations

import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etpi.doctor.machine import Examiner, MachineReport
from etpi.run.columns import aligned
from etpi_resources.lake.lake import Lake

COLUMNS = ("lake", "locks", "sandboxes", "accelerators", "page")
_TAKES = """
import sys
from pathlib import Path
from etpi.doctor.machine import Examiner
print(Examiner(Path(sys.argv[1]), "other", sys.argv[2]).can_take("flock"))
"""


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


def doctor(experiments: Sequence[str] = ()) -> int:
    """Examine this machine, print a table and the remedies, and return 1 if there is a fault.

    Args:
        experiments: where no container engine answers, that is a fault if one of these needs it, else a note.

    Raises SpecError: an experiment does not exist.
    """
    lake = Lake.open().root
    token = uuid.uuid4().hex[:12]
    examiner = Examiner(lake, socket.gethostname(), token)
    report = examiner.machine()
    findings = [*little_space(report), *unguarded(report)]
    if report.sandbox_error:
        findings.append(Finding(report.name, "sandboxes", "no sandbox starts", report.sandbox_error))
    findings += _containers(report.name, experiments)
    if report.lake_error:
        remedy = "name a folder that can be written in ETPI_DATA"
        findings.append(Finding(report.name, "lake", report.lake_error, remedy))
    else:
        findings += _own_lock(examiner, lake, token, report)
        examiner.tidy()
    facts = {"lake": report.lake_kind.split(" ")[0] or "?", "accelerators": str(len(report.accelerators))}
    print(table("machine", COLUMNS, {report.name: facts}, findings))
    return show(findings, "this machine")


def _containers(machine: str, experiments: Sequence[str]) -> list[Finding]:
    """Name the suites whose tasks run in containers, if no engine answers."""
    from etpi.rehearsal.starts import NO_DOCKER, docker_answers, docker_suites
    from etpi_assets.specs.load import load_specs

    specs = load_specs()
    for name in experiments:
        specs.get("experiment", name)
    suites = {suite for name in experiments for suite in specs.upstream_keys("experiment", name, "suite")}
    named = docker_suites(sorted(suites) if experiments else specs.suites, specs)
    if not named or docker_answers():
        return []
    what = f"no container engine answers, and {', '.join(named)} {'needs' if len(named) == 1 else 'need'} one"
    return [Finding(machine, "sandboxes", what, NO_DOCKER, fault=bool(experiments))]


def _own_lock(examiner: Examiner, lake: Path, token: str, report: MachineReport) -> list[Finding]:
    remedy = "the lake's file system ignores flock; name a folder on another one in ETPI_DATA"
    if error := examiner.hold("flock"):
        return [Finding(report.name, "locks", error, remedy)]
    try:
        answer = subprocess.run([sys.executable, "-c", _TAKES, lake, token], capture_output=True, text=True, timeout=60)
    finally:
        examiner.release()
    if answer.stdout.strip() == "False":
        return []
    what = f"a lock on {report.lake_kind} does not keep another process out {answer.stderr[-300:]}".strip()
    return [Finding(report.name, "locks", what, remedy)]
