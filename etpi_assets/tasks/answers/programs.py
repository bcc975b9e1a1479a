"""Judge programming answers: run the program of an answer against its tests.

Kinds of tests, by their keys:
    inputs, outputs               stdin, and the expected stdout (TACO, APPS)
    fn_name, inputs, outputs      arguments of a function (or of a method of `Solution`), and its value
    test, entry_point             code that defines `check(candidate)`, and the candidate's expression
                                  (LeetCodeDataset); `prelude` or `prompt`: code that is put before the program

The host compares stdout and values. `check` runs in the program's own process, with holes instead of its expected
values (`holes`), if the task has a reference solution that they can be tried on.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etpi_assets.tasks.calibration import TestRun
from etpi_assets.tasks.family import BLIND, Rejected, Verdict
from etpi_assets.tasks.graded_run import RECORDER, GradedRun, read_reports
from etpi_assets.tasks.proof import Tests, Trial, judge_trial
from etpi_resources.hashes import json_hash
from etpi_resources.outside import loads
from etpi_resources.sandboxes import Limits, Sandbox, SandboxFactory

_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)\n?```", re.DOTALL)
EMPTY = "```python\npass\n```"
"""An answer whose program does nothing."""

_CALL = """
import json, sys
sys.path.insert(0, "")
import solution
arguments = json.load(sys.stdin)
holder = solution.Solution() if hasattr(solution, "Solution") else solution
value = getattr(holder, {name!r})(*arguments)
print()
print({mark!r} + json.dumps(value))
"""
_CHECK = """
import sys
sys.path.insert(0, "")
import {recorder}
etpi_recorder = {recorder}.Recorder()
etpi_recorder.node = {node!r}
from solution import *
{test}
check({entry})
etpi_recorder.report(0)
print()
print({mark!r})
"""
_FILE, _NODE = "check.py", "check.py::check"


def read_tests(truth: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tests of a row in one form. Raises ValueError if there are none or their kind is unknown."""
    if "test" in truth and "entry_point" in truth:
        prelude = truth.get("prelude") or truth.get("prompt") or ""
        return {"test": str(truth["test"]), "entry_point": str(truth["entry_point"]), "prelude": str(prelude)}
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if not inputs or not outputs or len(inputs) != len(outputs):
        wanted = "inputs and outputs in pairs, or test and entry_point"
        raise ValueError(f"tests of a program need {wanted}; there are {sorted(truth)}")
    name = truth.get("fn_name")
    if name is not None and not str(name).isidentifier():
        raise ValueError(f"fn_name = {name!r} is no name")
    cases = [
        [_typed(test_input, name), _typed(wanted, name)] for test_input, wanted in zip(inputs, outputs, strict=True)
    ]
    return {"cases": cases, "fn_name": name}


def as_answer(program: str) -> str:
    """Return a text from which `program_of` extracts this program; text that has a code block is unchanged."""
    return program if _BLOCK.search(program) else f"```python\n{program}\n```"


def program_of(text: str) -> str | None:
    """Return the last fenced block of Python; None if there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks and blocks[-1].strip() else None


def judge(
    tests: Mapping[str, Any], text: str, limits: Limits, sandboxes: SandboxFactory, proved: Mapping[str, Any] = {}
) -> Verdict:
    """Return passed, failed_tests (with the first failed test) or no_answer. Only inputs enter the sandbox.

    Args:
        proved: the task's payload, with the reference of a `check`; {}: there is none.
    """
    program = program_of(text)
    if program is None:
        return Verdict(0.0, "no_answer", {"tests": 0})
    if "test" in tests:
        trial = CheckTrial(tests, proved.get("reference"), limits)
        passed, details = judge_trial(trial, proved, program, sandboxes)
    else:
        with sandboxes.create({"solution.py": program + "\n"}, replace(limits, output_bytes=4 << 20)) as sandbox:
            problem = _compared(tests, sandbox)
        passed, details = problem is None, {**(problem or {}), "verdict_trust": BLIND}
    return Verdict(float(passed), "passed" if passed else "failed_tests", details)


@dataclass(frozen=True)
class CheckTrial(Trial):
    """The run of a `check`. Work is the text of a program.

    Attributes:
        truth: see `read_tests`.
        solution: the reference's answer; None: there is none.
    """

    truth: Mapping[str, Any]
    solution: str | None
    limits: Limits
    key = "check"
    nothing = "pass"
    needs = None

    @property
    def identity(self) -> str:
        return json_hash([self.truth, self.solution])

    @property
    def place(self) -> None:
        return None

    def tests(self, sandboxes: SandboxFactory) -> Tests:
        return Tests({_FILE: str(self.truth["test"])}, {})

    def reference(self, sandboxes: SandboxFactory) -> str:
        if program := program_of(self.solution or ""):
            return program
        raise Rejected("no_reference", "there is no reference program")

    def run(
        self, work: str, tests: Tests, sandboxes: SandboxFactory, *, recorded: bool, record: bool = False
    ) -> GradedRun:
        mark, recorder = secrets.token_hex(8), f"recorder_{secrets.token_hex(6)}"
        entry = self.truth["entry_point"]
        check = _CHECK.format(test=tests.files[_FILE], entry=entry, mark=mark, recorder=recorder, node=_NODE)
        source = f"{self.truth['prelude']}\n{work}" if self.truth.get("prelude") else work
        files = {"solution.py": source + "\n", _FILE: check, f"{recorder}.py": RECORDER}
        with sandboxes.create(files, replace(self.limits, output_bytes=4 << 20)) as sandbox:
            done = sandbox.run(f"python3 -B -I {_FILE} 2>&1")
            records = [record for report in read_reports(sandbox, ".") for record in report.records]
        outcome = "passed" if done.output.rstrip().endswith(f"\n{mark}") else "failed"
        return GradedRun(done.output, done.exit_code, done.timed_out, [_NODE], {_NODE: outcome}, records)

    def passes(self, test: TestRun) -> tuple[float, Mapping[str, Any]]:
        if test.passed:
            return 1.0, {}
        return 0.0, {"test": 0, "why": test.failed.get(_NODE, "check did not reach its end")}


def _compared(tests: Mapping[str, Any], sandbox: Sandbox) -> dict[str, Any] | None:
    name = tests["fn_name"]
    for number, (test_input, wanted) in enumerate(tests["cases"]):
        mark = secrets.token_hex(8)
        files = {"input": json.dumps(test_input) if name else test_input}
        if name:
            files["call.py"] = _CALL.format(name=name, mark=mark)
        sandbox.write_files(files)
        done = sandbox.run(f"python3 -B {'-I call.py' if name else 'solution.py'} < input 2>/dev/null")
        if name:
            value, wrapped = _value(done.output, mark), isinstance(wanted, list) and len(wanted) == 1
            # Some data sets wrap the expected value in a list.
            right = value is not None and value[0] in (wanted, *(wanted if wrapped else ()))
        else:
            right = done.exit_code == 0 and _lines(done.output) == _lines(wanted)
        if not right:
            return {"test": number, "exit_code": done.exit_code, "output": done.output[-500:]}
    return None


def _value(output: str, mark: str) -> tuple[Any] | None:
    """Return the value after the mark in a tuple, to tell null from a missing value."""
    for line in reversed(output.splitlines()):
        if line.startswith(mark):
            try:
                return (loads(line[len(mark) :]),)
            except ValueError:
                return None
    return None


def _lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _typed(value: Any, name: Any) -> Any:
    """Return stdin or stdout as one text (lines joined); arguments and values of functions stay JSON."""
    if name is not None:
        return value
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
