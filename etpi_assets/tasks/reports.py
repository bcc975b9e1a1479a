"""Parsers of test runners' output: test -> outcome."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Outcomes = dict[str, str]
"""Test -> PASSED, FAILED, ERROR or SKIPPED."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\u001b\[[0-9;]*m")
_OUTCOME = re.compile(r"(ok|FAIL|ERROR|skipped .*|expected failure)")
_UNITTEST = re.compile(rf"(?:.*\s)?{_OUTCOME.pattern}$")
_UNITTEST_WORDS = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR", "expected failure": "PASSED"}


def plain(text: str) -> str:
    """Return the text without terminal colours."""
    return _COLOUR.sub("", text)


def unittest_outcomes(output: str) -> Outcomes:
    """Return the outcomes that `unittest` and Django's runner print at verbosity 2, by `test (module.Class)`.

    Other output may come between a name and its outcome, which then begins a line."""
    outcomes: Outcomes = {}
    waiting = ""
    for line in plain(output).splitlines():
        name, named, result = line.strip().partition(" ... ")
        match = _UNITTEST.match(result) if named else _OUTCOME.fullmatch(name)
        waiting = name if named else waiting
        if waiting and match:
            outcomes[waiting] = _UNITTEST_WORDS.get(match[1], "SKIPPED")
            waiting = ""
    return outcomes


def equal_outcomes(outcomes: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[bool, Mapping[str, Any]]:
    """Return whether the outcomes of a run are exactly the expected ones, and details for a reader."""
    wrong = sorted(name for name in outcomes.keys() | wanted.keys() if outcomes.get(name) != wanted.get(name))
    return bool(outcomes) and bool(wanted) and not wrong, {"tests": len(outcomes), "wrong": wrong[:20]}


def counts(output: str) -> tuple[int, int]:
    """Return (passed, failed) from the summary of Jest, Vitest, pytest, Go or Cargo.

    If Go cannot build a package, no test counts as passed."""
    text = plain(output)
    if match := re.search(r"Tests:\s*(?:(\d{1,9})\s*failed,\s*)?(\d{1,9})\s*passed", text):
        return int(match[2]), int(match[1] or 0)
    passed, failed, errors = (re.search(rf"(?<!\d)(\d{{1,9}}) {word}", text) for word in ("passed", "failed", "error"))
    if passed or failed or errors:
        return int(passed[1]) if passed else 0, sum(int(m[1]) for m in (failed, errors) if m)
    passes, fails = (len(re.findall(rf"--- {word}:", text)) for word in ("PASS", "FAIL"))
    if passes or fails:
        return passes, fails
    passes, fails = (len(re.findall(rf"^{word}\s+\S+", text, re.MULTILINE)) for word in ("ok", "FAIL"))
    return (0 if fails else passes), fails
