"""Hidden tests of invented repositories: functions of frozen trees called in a sandbox, their values compared outside.

Belongs here: running the calls and reading what comes back. Does not belong here: what a value should be, or a verdict.

Only the arguments enter the sandbox. So nothing that runs inside can forge a pass without computing the values; tested
code runs in a child process of its own, which `hidden_tests` forks inside.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etpi_resources.sandboxes import Limits, SandboxFactory

JOB_SECONDS = 5
"""Processor and wall time of one job's calls."""

FunctionCall = tuple[str, str, Sequence[Any]]
"""A module's path, a function in it, the arguments it is called with one after the other."""

CallResults = dict[str, dict[str, list[Any] | None]]
"""Job -> call's key -> the values it returned, None where it did not return integers."""

_LIMITS = Limits(command_seconds=120.0, output_bytes=4 * 1024**2)
_RUNNER = Path(__file__).with_name("hidden_tests.py").read_text(encoding="utf-8")


def run_calls(
    trees: Mapping[str, Mapping[str, str]],
    jobs: Mapping[str, tuple[str, Mapping[str, FunctionCall]]],
    sandboxes: SandboxFactory,
) -> CallResults:
    """Run each job (the name of its tree, and its calls by key) in one sandbox, in a child process each. A job whose
    child died or hung has no values."""
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


def _report(text: str) -> tuple[str, dict[str, list[Any] | None]]:
    """A line of the runner: the job, and JSON that tested code may have written, so anything may stand in it."""
    job, _, values = text.strip().partition(" ")
    try:
        report = json.loads(values)
    except (ValueError, RecursionError):
        report = None
    return job, report if isinstance(report, dict) else {}
