"""Run pytest in a sandbox with a recorder of its tests; docs/verdicts.md has the guarantees.

A single run proves nothing, since the code under test shares pytest's process: `challenge` tests what a run reports.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from etpi_resources.sandboxes import Sandbox

_INBOX = ".etpi-grading"
_RECORDER = Path(__file__).with_name("pytest_recorder.py").read_text(encoding="utf-8")
_PYTHONS = "for p in .venv/bin/python python python3; do command -v $p > /dev/null && break; done"
_LIST_PLUGINS = (
    "import importlib.metadata as m; e = m.entry_points(); "
    "print(*sorted({p.name for p in (e.select(group='pytest11') if hasattr(e, 'select') else e.get('pytest11', ()))}), "
    "sep='\\n')"
)


class Report(BaseModel):
    """The results that the recorder writes in a sandbox."""

    collected: list[str]
    outcomes: dict[str, str]
    exit: int


@dataclass(frozen=True)
class GradedRun:
    """A run of tests.

    Attributes:
        output, exit_code: as the command left them.
        tests: the hidden test files that ran, path -> text.
        outcomes: node id -> kind (see `pytest_recorder`).
        problem: why the run cannot count; None: it can.
    """

    output: str
    exit_code: int
    tests: Mapping[str, str]
    outcomes: Mapping[str, str]
    problem: str | None

    def of_kind(self, *kinds: str) -> set[str]:
        return {node for node, kind in self.outcomes.items() if kind in kinds}


def installed_plugins(sandbox: Sandbox) -> list[str] | None:
    """Return the pytest plugins of an environment before any patch; None if they cannot be listed."""
    done = sandbox.run(f"{_PYTHONS}; $p -s -c {shlex.quote(_LIST_PLUGINS)}")
    return None if done.exit_code else done.output.split()


def run_graded(
    sandbox: Sandbox,
    command: str,
    *,
    tests: Mapping[str, str],
    roots: Sequence[str] = (),
    plugins: Sequence[str] | None = None,
) -> GradedRun:
    """Run a command that starts pytest, with the recorder.

    Args:
        tests: the hidden test files, path -> text.
        roots: folders of the workspace that the code under test is imported from.
        plugins: the only pytest plugins to load; None: all that pytest discovers.

    Raises:
        OSError: the recorder cannot be written to the sandbox.
    """
    recorder, folder = f"recorder_{secrets.token_hex(6)}", f"/tmp/{secrets.token_hex(8)}"
    sandbox.write_files({f"{_INBOX}/{recorder}.py": f"ROOTS = {list(roots)!r}\n{_RECORDER}"})
    moved = sandbox.run(f"mkdir -m 700 {folder} && mv {_INBOX}/* {folder}/ && rmdir {_INBOX}")
    if moved.exit_code:
        raise OSError(f"the judge's files could not be put into its sandbox: {moved.output[-500:]}")
    options = " ".join(["-p", recorder, *(f"-p {shlex.quote(name)}" for name in plugins or ())])
    variables = {
        "PYTHONPATH": folder,
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTEST_ADDOPTS": options,
        **({} if plugins is None else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
    }
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    done = sandbox.run(f"export {exports}; {command}")
    written = sandbox.run(f"for file in {folder}/report-*; do cat $file; echo; done; rm -rf {folder}").output
    reports = list(_reports(written))
    outcomes = {node: kind for report in reports for node, kind in report.outcomes.items()}
    return GradedRun(done.output, done.exit_code, tests, outcomes, _problem(reports, done.exit_code))


def disagreement(run: GradedRun, printed: Iterable[str]) -> str | None:
    """Return a message if the output lists passed tests that the recorder did not see pass, else None."""
    listed, seen = ({_last(name) for name in names} for names in (printed, run.of_kind("passed", "xfailed")))
    if listed - seen:
        return f"the output lists passed tests that did not pass: {sorted(listed - seen)[:5]}"
    return None


def _reports(written: str) -> Iterator[Report]:
    """Yield the readable reports; code under test may have written others."""
    for line in written.splitlines():
        with contextlib.suppress(ValidationError):
            yield Report.model_validate_json(line)


def _problem(reports: Sequence[Report], exit_code: int) -> str | None:
    if not reports:
        return "the run has no report: pytest did not reach its end"
    for report in reports:
        if absent := sorted(set(report.collected) - report.outcomes.keys()):
            return f"collected tests did not run: {absent[:5]}"
    if exit_code == 0 and any(report.exit for report in reports):
        return "the exit status is 0, the reported one is not"
    return None


def _last(name: str) -> str:
    """Return a node id without its file's folder: summary and recorder may have different root folders."""
    path, separator, rest = name.partition("::")
    return f"{path.rpartition('/')[2]}{separator}{rest}"
