"""The command `etpi audit`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from etpi.audit import report as reports
from etpi.audit.file import audit_file
from etpi.audit.report import Report
from etpi.init.student import read_student
from etpi_assets.specs.load import SpecError
from etpi_resources.lake.check_outcome import CheckOutcome


def of_file(source: str, model: str, heldout: str | None, format: str, columns: str | None) -> Report:
    """Audit a training file. Raises UsageError: the file or the model cannot be read."""
    try:
        if any((Path(source) / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise SpecError(f"{source} is a checkpoint: write --base MODEL, the model it was trained from")
        return audit_file(Path(source), model, Path(heldout) if heldout else None, format, columns)
    except (SpecError, ValueError, FileNotFoundError) as error:
        raise click.UsageError(str(error)) from error


def of_checkpoint(source: str, base: str, url: str | None, name: str | None, key_env: str | None) -> list[CheckOutcome]:
    """Audit a checkpoint. Raises UsageError: its files or its base cannot be read."""
    from etpi.audit.checkpoint import audit_checkpoint

    try:
        student = read_student(base)
        if student.folder is None:
            raise SpecError(f"base {base}: {student.unknown}")
        server = (url, name, key_env) if url and name else None
        return list(audit_checkpoint(Path(source), student.folder, server))
    except (OSError, ValueError, RuntimeError) as error:
        raise click.UsageError(str(error)) from error


def show_checks(outcomes: list[CheckOutcome], source: str, base: str, as_json: bool) -> int:
    """Print the checks of a checkpoint; return 1 if one failed, else 0."""
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    if as_json:
        checks = [{"name": one.name, "passed": one.passed, "message": one.message} for one in outcomes]
        click.echo(
            json.dumps({"version": 1, "path": source, "base": base, "failed": failed, "checks": checks}, indent=1)
        )
    for one in () if as_json else outcomes:
        mark = click.style("ok   ", fg="green") if one.passed else click.style("FAULT", fg="red", bold=True)
        click.echo(f"{mark}  {click.style(one.name, bold=not one.passed)}: {one.message}")
    return 1 if failed else 0


def bound_of(fail_on: str) -> tuple[str, float]:
    """Return the level and the share of `LEVEL[=SHARE]`. Raises UsageError: it is of another form."""
    level, _, bound = fail_on.partition("=")
    try:
        share = float(bound or 0)
    except ValueError:
        share = -1.0
    if level not in (*reports.LEVELS, "never") or not 0 <= share <= 1:
        known = ", ".join((*reports.LEVELS, "never"))
        raise click.UsageError(
            f"--fail-on {fail_on}: write LEVEL or LEVEL=SHARE, a level of {known} and a share up to 1"
        )
    return level, share


def show(report: Report, start: float, bound: tuple[str, float], as_json: bool, page: str | None) -> int:
    """Print a report and write its page; return 1 if a finding is above the bound, else 0."""
    failed = report.failed(*bound)
    if page:
        Path(page).write_text(reports.page(report), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(reports.as_json(report, failed), ensure_ascii=False, indent=1))
    else:
        for line in reports.terminal(report, time.monotonic() - start):
            click.echo(line)
    return 1 if failed else 0
