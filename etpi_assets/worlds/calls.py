"""Hidden tests of generated repositories: call functions in a sandbox, and return their values to the host.

Only arguments enter the sandbox, never expected values: the host compares, so tested code cannot forge a pass without
computing the values. `hidden_tests` runs inside and forks a child process for each job.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etpi_assets.tasks.family import REFERENCE_RUNS, Rejected, RejectedInput, Task, proved
from etpi_resources.outside import loads
from etpi_resources.sandboxes import Limits, SandboxFactory

JOB_SECONDS = 5
"""Processor and wall time of one job's calls."""

FunctionCall = tuple[str, str, Sequence[Any]]
"""A module's path, the name of a function in it, and arguments: one call each."""

CallResults = dict[str, dict[str, list[Any] | None]]
"""Job -> key of the call -> the returned values; None if they are not integers."""

_LIMITS = Limits(command_seconds=120.0, output_bytes=4 * 1024**2)
_RUNNER = Path(__file__).with_name("hidden_tests.py").read_text(encoding="utf-8")


def run_calls(
    trees: Mapping[str, Mapping[str, str]],
    jobs: Mapping[str, tuple[str, Mapping[str, FunctionCall]]],
    sandboxes: SandboxFactory,
) -> CallResults:
    """Run all jobs in one sandbox, each in its own child process.

    Args:
        trees: name -> files (path -> text).
        jobs: name -> (name of its tree, calls by key).

    A job whose child process dies or exceeds JOB_SECONDS has no values.
    """
    nonce = secrets.token_hex(16)
    plan = [
        {"job": job, "tree": f"trees/{tree}", "calls": {json.dumps(key): call for key, call in calls.items()}}
        for job, (tree, calls) in jobs.items()
    ]
    files = {f"trees/{tree}/{path}": text for tree, texts in trees.items() for path, text in texts.items()}
    files |= {"hidden_tests.py": _RUNNER, "plan": repr(json.loads(json.dumps(plan)))}
    with sandboxes.create(files, _LIMITS) as sandbox:
        outcome = sandbox.run(f"python3 -I -S -B hidden_tests.py {nonce} {JOB_SECONDS}")
    results: CallResults = {}
    for line in outcome.output.splitlines():
        if line.startswith(nonce):
            job, values = _report(line.removeprefix(nonce))
            results.setdefault(job, values)
    return results


def prove_calls(
    tasks: Sequence[Task],
    trees: Callable[[Task], tuple[Mapping[str, str], Mapping[str, str]]],
    calls: Callable[[Task], Mapping[str, FunctionCall]],
    failed: Callable[[Task, Mapping[str, list[Any] | None]], Sequence[str]],
    sandboxes: SandboxFactory,
    *,
    each: bool = False,
) -> Iterator[RejectedInput | Task]:
    """Yield each task, in order, or its rejection; the runs of all of them are in one sandbox.

    Args:
        trees: returns the untouched tree and the solved one; raises Rejected.
        failed: returns the keys of the calls whose values are not as they have to be.
        each: whether every call has to fail in the untouched tree, and not one of them.
    """
    files: dict[str, Mapping[str, str]] = {}
    jobs: dict[str, tuple[str, Mapping[str, FunctionCall]]] = {}
    rejected: dict[int, RejectedInput] = {}
    for index, task in enumerate(tasks):
        try:
            files[f"{index}/null"], files[f"{index}/solved"] = trees(task)
        except Rejected as error:
            rejected[index] = RejectedInput(task.task_id, error.reason, str(error))
            continue
        jobs[f"{index}/null"] = f"{index}/null", calls(task)
        jobs |= {f"{index}/{run}": (f"{index}/solved", calls(task)) for run in range(REFERENCE_RUNS)}
    values = run_calls(files, jobs, sandboxes)
    for index, task in enumerate(tasks):
        if index in rejected:
            yield rejected[index]
            continue
        runs = [failed(task, values.get(f"{index}/{run}", {})) for run in ("null", *range(REFERENCE_RUNS))]
        passes = len(runs[0]) < len(calls(task)) if each else not runs[0]
        yield proved(task, [wrong for wrong in runs[1:] if wrong], null=passes)


def _report(text: str) -> tuple[str, dict[str, list[Any] | None]]:
    """Parse a line of the runner as (job, values). Tested code may have written the JSON, so it may be anything."""
    job, _, values = text.strip().partition(" ")
    try:
        report = loads(values)
    except ValueError:
        report = None
    return job, report if isinstance(report, dict) else {}
