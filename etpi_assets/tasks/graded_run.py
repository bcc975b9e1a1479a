"""Run pytest in a sandbox with a recorder of its tests and holes; docs/verdicts.md has the guarantees."""

from __future__ import annotations

import base64
import contextlib
import secrets
import shlex
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ValidationError

from etpi_resources.sandboxes import Sandbox

_INBOX = ".etpi-grading"
RECORDER = Path(__file__).with_name("pytest_recorder.py").read_text(encoding="utf-8")
_PYTHONS = "for p in .venv/bin/python python python3; do command -v $p > /dev/null && break; done"
_MOST = 256 << 20
"""Bytes of the reports of one run."""
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
    records: list[tuple[str, str, list[str], int]] = []


@dataclass(frozen=True)
class GradedRun:
    """A run of tests: claims of the process that ran them, code under test included.

    Attributes:
        output, exit_code, timed_out: as the command left them.
        collected: node ids as pytest prints them, in order.
        outcomes: node id -> kind (see `pytest_recorder`).
        records: (node id, key of a hole, recorded values as Python's source, number) each.
        problem: why the run cannot count; None: it can.
        rewards: name of a reward file that the tests left -> its text (the family `harbor`).
    """

    output: str
    exit_code: int
    timed_out: bool = False
    collected: Sequence[str] = ()
    outcomes: Mapping[str, str] = field(default_factory=dict)
    records: Sequence[tuple[str, str, list[str], int]] = ()
    problem: str | None = None
    rewards: Mapping[str, str] = field(default_factory=dict)

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
    recorded: bool = True,
    roots: Sequence[str] = (),
    plugins: Sequence[str] | None = None,
    timeout: float | None = None,
    safe_path: bool = True,
) -> GradedRun:
    """Run a command that starts pytest, with the recorder.

    Args:
        recorded: False: any command runs as it is, and its output counts.
        roots: folders of the workspace that the code under test is imported from.
        plugins: the only pytest plugins to load; None: all that pytest discovers.
        timeout: seconds; None: the sandbox's limit.
        safe_path: whether Python ignores the current directory, and the user's packages.

    Raises:
        OSError: the recorder cannot be written to the sandbox.
    """
    if not recorded:
        done = sandbox.run(command, timeout=timeout)
        return GradedRun(done.output, done.exit_code, done.timed_out)
    recorder, folder = f"recorder_{secrets.token_hex(6)}", f"/tmp/{secrets.token_hex(8)}"
    sandbox.write_files({f"{_INBOX}/{recorder}.py": f"ROOTS = {list(roots)!r}\n{RECORDER}"})
    moved = sandbox.run(f"mkdir -m 700 {folder} && mv {_INBOX}/* {folder}/ && rmdir {_INBOX}")
    if moved.exit_code:
        raise OSError(f"the judge's files could not be put into its sandbox: {moved.output[-500:]}")
    options = " ".join(["-p", recorder, *(f"-p {shlex.quote(name)}" for name in plugins or ())])
    variables = {
        "PYTHONPATH": folder,
        "PYTEST_ADDOPTS": options,
        **({"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"} if safe_path else {}),
        **({} if plugins is None else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
    }
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    done = sandbox.run(f"export {exports}; {command}", timeout=timeout)
    reports = list(read_reports(sandbox, folder))
    sandbox.run(f"rm -rf {folder}")
    outcomes = {node: kind for report in reports for node, kind in report.outcomes.items()}
    return GradedRun(
        done.output,
        done.exit_code,
        done.timed_out,
        [node for report in reports for node in report.collected],
        outcomes,
        [record for report in reports for record in report.records],
        _problem(reports, done.exit_code),
    )


def read_reports(sandbox: Sandbox, folder: str) -> Iterator[Report]:
    """Yield the readable reports of a folder, of at most _MOST bytes; code under test may have written others."""
    files = f"for file in {folder}/report-*; do [ -f $file ] && cat $file && echo; done"
    packed = sandbox.run(f"{files} | gzip | base64 -w 0").output
    with contextlib.suppress(ValueError, zlib.error):
        written = zlib.decompressobj(wbits=31).decompress(base64.b64decode(packed), _MOST).decode(errors="replace")
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
