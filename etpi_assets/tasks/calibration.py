"""A calibration of hidden tests by their reference solution, and the comparison of a run's records with it.

A run of tests with holes (`holes`) records values; `compared` compares them outside the sandbox, and their numbers with
those of the reference. A calibration notes which assertions can have holes, and how far each test can be trusted.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from etpi_assets.tasks.family import BLIND, REFERENCE_RUNS, REVERSED, UNCHALLENGED, weakest
from etpi_assets.tasks.graded_run import GradedRun
from etpi_assets.tasks.holes import Holed, dig, source_of
from etpi_assets.tasks.reports import Outcomes

_VALUES = Path(__file__).with_name("values.py")
_COMPARE_SECONDS = 60
_CELL = re.compile(r"Cell\('(\w+)'\)")
_CALIBRATIONS = 5
"""Runs of the reference, at most, to find the assertions that holes do not fit."""
_WORDS = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "xfailed": "PASSED", "xpassed": "FAILED"}
"""Kind of a test -> its word in pytest's summary; skipped tests have none."""


class Calibration(BaseModel):
    """Facts that a reference solution shows about a trial's tests. Functions are named "path::Class::test".

    Attributes:
        kept: path -> places of assertions that keep their literals, since a hole does not fit them.
        whole: paths of files that stay without holes.
        names: node id with holes -> node id without.
        other: node id -> its kind with the reference, if that is not "passed".
        counts: function -> place of a hole, with the cells in it -> number of comparisons; 0: at least one.
        lengths: path -> place -> characters of the text in which something is looked for.
        reward: the file to which the tests write a reward, in the family `harbor`.
        turned: function that fails without a solution -> number of its nodes that pass with it.
        trust: function that had to turn -> its trust.
    """

    kept: dict[str, list[str]] = {}
    whole: list[str] = []
    names: dict[str, str] = {}
    other: dict[str, str] = {}
    counts: dict[str, dict[str, int]] = {}
    lengths: dict[str, dict[str, int]] = {}
    turned: dict[str, int] = {}
    trust: dict[str, str] = {}
    reward: str = ""

    @property
    def records(self) -> bool:
        """Return whether tests are recorded: else the output and the exit status of their runner count."""
        return "all" not in self.trust

    def trusts(self) -> dict[str, Any]:
        """Return the details of a verdict: how many functions have each trust, and the weakest of those."""
        counts = Counter(self.trust.values())
        levels = {level: counts[level] for level in (BLIND, REVERSED, UNCHALLENGED)}
        return {"trust": levels, "verdict_trust": weakest(self.trust.values())}


PLAIN = Calibration(trust={"all": UNCHALLENGED})
"""Of tests that are not recorded."""


@dataclass
class TestRun:
    """A run of tests after the host compared its records.

    Attributes:
        run: the claims.
        calibration: that of the reference.
        failed: node id, or function, of a test whose recorded values are wrong -> the reason.
        turned_over, cheated: node ids with a reversed assertion that failed, and that passed.
        dug: the files with holes.
        compared: (the reason why it disagrees or None, the length of a text that is searched) of each record.
    """

    __test__: ClassVar[bool] = False  # for pytest
    run: GradedRun
    calibration: Calibration = field(default_factory=Calibration)
    failed: dict[str, str] = field(default_factory=dict)
    turned_over: set[str] = field(default_factory=set)
    cheated: list[str] = field(default_factory=list)
    dug: Holed = field(default_factory=Holed)
    compared: Sequence[tuple[str | None, int]] = ()

    @property
    def exit_code(self) -> int:
        """The command's exit status; 0 where it is 1 because of the tests that were reversed, and failed."""
        return 0 if self.run.exit_code == 1 and self.turned_over else self.run.exit_code

    def original(self, node: str) -> str:
        """Return a node's id without holes."""
        return self.calibration.names.get(node, node)

    def kinds(self) -> dict[str, str]:
        """Return node id -> kind (see `pytest_recorder`) after the comparison; a reversed test that failed passes."""
        differs = {"passed": "failed", "xpassed": "xfailed"}
        kinds = {node: differs.get(k, k) if node in self.failed else k for node, k in self.run.outcomes.items()}
        return {**kinds, **dict.fromkeys(self.turned_over, "passed")}

    @property
    def passed(self) -> list[str]:
        return [node for node, kind in self.kinds().items() if kind == "passed"]

    @property
    def agrees(self) -> bool:
        """Return whether no test disagrees that passes with the reference."""
        return all(self.original(name) in self.calibration.other for name in self.failed)

    def outcomes(self) -> Outcomes:
        """Return the outcomes after the comparison, by the names and words of a summary of the original tests."""
        return {self.original(node): _WORDS[kind] for node, kind in self.kinds().items() if kind in _WORDS}

    def counts(self) -> dict[str, Counter[str]]:
        """Return function -> place of a hole, with the places of the cells expected there -> comparisons that agree."""
        function_of = _function_of(self.dug.files)
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for node, places in self.counts_of_nodes().items():
            counts[function_of(node)] += places
        return counts

    def counts_of_nodes(self) -> dict[str, Counter[str]]:
        """Return the same for node ids without holes.

        Comparisons of tests that do not pass with the reference are not counted."""
        function_of = _function_of(self.dug.files)
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for (node, key, values, number), (reason, _) in zip(self.run.records, self.compared, strict=True):
            name = self.original(node)
            if reason is None and name not in self.calibration.other:
                cells = [match[1] for value in values[1:] if (match := _CELL.fullmatch(value))]
                places = [self._place(each, function_of(node)) for each in (key, *cells)]
                counts[name][" ".join(places)] += number
        return counts

    def _place(self, key: str, function: str) -> str:
        """Return the place of a hole or cell, after its path where that is not the function's."""
        path, place = self.dug.places.get(key, ("", "?"))
        return place if function.startswith(f"{path}::") else f"{path}:{place}"


def dig_files(files: Mapping[str, str], calibration: Calibration, reverse: Collection[str] = ()) -> Holed:
    """Return the Python files with holes."""
    chosen = {path: text for path, text in files.items() if path.endswith(".py") and path not in calibration.whole}
    return dig(chosen, f"k{secrets.token_hex(5)}_", calibration.kept, reverse)


def compared(run: GradedRun, dug: Holed, calibration: Calibration, reverse: Collection[str] = ()) -> TestRun:
    """Compare a run's records with the expected values, and their numbers with those of the reference."""
    result = TestRun(run, calibration, dug=dug, compared=_compare(run, dug, calibration))
    counts, function_of = result.counts(), _function_of(dug.files)
    for (node, *_), (reason, _) in zip(run.records, result.compared, strict=True):
        if reason is not None:
            result.failed.setdefault(node, reason)
            if result.original(node) not in calibration.other:  # whatever node of the function a report names
                result.failed.setdefault(function_of(node), reason)
    for function, expected in calibration.counts.items():
        if function not in reverse and (places := _differences(expected, counts.get(function, {}))):
            result.failed.setdefault(function, f"comparisons at {places}")
    for node, kind in run.outcomes.items():
        function = function_of(node)
        if function in reverse:
            if kind == "passed":
                result.cheated.append(node)
            elif kind == "failed":
                result.turned_over.add(node)
        elif function in result.failed and result.original(node) not in calibration.other:
            result.failed.setdefault(node, result.failed[function])
    return result


def _differences(expected: Mapping[str, int], counts: Mapping[str, int]) -> list[str]:
    """Return places that were compared more or less often than with the reference; where it is 0, not at all."""
    return sorted(p for p, n in expected.items() if (counts.get(p, 0) != n if n else not counts.get(p, 0)))


def _compare(run: GradedRun, dug: Holed, calibration: Calibration) -> list[tuple[str | None, int]]:
    """Compare all records in one process (`values`)."""
    holes: dict[str, dict[str, Any]] = {}
    for key, hole in dug.holes.items():
        path, place = dug.places[key]
        holes[key] = {**hole, "longest": calibration.lengths.get(path, {}).get(place)}
    known = [record[1:3] for record in run.records if record[1] in holes]
    answers: list[tuple[str | None, int]] = [("cannot be compared", 0)] * len(known)
    if known:
        done = subprocess.run(
            [sys.executable, "-I", str(_VALUES), str(_COMPARE_SECONDS)],
            input=json.dumps({"holes": holes, "cells": dug.cells, "records": known}),
            capture_output=True, text=True, check=False, cwd="/", env={},
        )  # fmt: skip
        answers = json.loads(done.stdout) if done.returncode == 0 else answers
    rest = iter(answers)
    return [next(rest) if record[1] in holes else ("no such hole", 0) for record in run.records]


def reversals(test: TestRun) -> Counter[str]:
    """Return function -> number of its nodes whose reversed assertion failed."""
    return Counter(map(_function_of(test.dug.files), test.turned_over))


def _function_of(files: Collection[str]) -> Callable[[str], str]:
    """Return a function: node id -> "path::Class::test", whatever folder the node id is relative to."""
    paths: dict[str, str] = {}

    def function(node: str) -> str:
        file, _, rest = node.partition("[")[0].partition("::")
        if file not in paths:
            ends = [p for p in files if p == file or p.endswith(f"/{file}") or file.endswith(f"/{p}")]
            paths[file] = max(ends, key=len) if ends else file
        return f"{paths[file]}::{rest}"

    return function


def unlike_reference(calibration: Calibration, test: TestRun) -> str | None:
    """Return a message about tests that were not run as with the reference; else None."""
    skipped = test.run.of_kind("skipped", "xfailed")
    unlike = {node for node in skipped if calibration.other.get(test.original(node)) != test.run.outcomes[node]}
    files = {name.partition("::")[0] for name in [*calibration.turned, *calibration.counts]}
    passed = Counter(map(_function_of(files), test.passed))
    unlike |= {name for name, number in calibration.turned.items() if passed[name] < number}
    return f"tests did not run as with the reference: {sorted(unlike)[:5]}" if unlike else None


def fitted(plain: GradedRun, attempt: Callable[[Calibration], TestRun]) -> tuple[Calibration, list[TestRun]]:
    """Return (a calibration with which the reference passes every comparison, the runs that it has to pass).

    Args:
        plain: its run without holes.
        attempt: runs it with holes.
    """
    good, calibration, runs = plain.of_kind("passed"), Calibration(), 1
    while True:
        runs, test = runs + 1, attempt(calibration)
        calibration.names, torn = _renamed(plain.collected, test.run.collected)
        if not _fit(calibration, test, good, torn) or not test.dug.files:
            break
        if runs > _CALIBRATIONS:
            calibration = Calibration(whole=sorted(test.dug.files))
    calibration.other = {node: kind for node, kind in plain.outcomes.items() if kind != "passed"}
    calibration.counts, calibration.lengths = _counts(test), _lengths(test)
    more = [attempt(calibration) for _ in range(max(1, REFERENCE_RUNS - runs))]
    for counts in (_counts(again) for again in more):
        for function, places in calibration.counts.items():
            now = counts.get(function, {})
            calibration.counts[function] = {p: n if now[p] == n else 0 for p, n in places.items() if p in now}
    return calibration, [compared(again.run, again.dug, calibration) for again in more]


def _renamed(before: Sequence[str], after: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Return ({node id with holes: without} where they differ, functions whose nodes differ in number)."""
    old, new = ({}, {})
    for groups, nodes in ((old, before), (new, after)):
        for node in nodes:
            groups.setdefault(node.partition("[")[0], []).append(node)
    torn = {base for base, nodes in old.items() if len(nodes) != len(new.get(base, ()))}
    pairs = [pair for base in old.keys() - torn for pair in zip(new[base], old[base], strict=True)]
    return {a: b for a, b in pairs if a != b}, torn


def _fit(calibration: Calibration, test: TestRun, good: set[str], torn: set[str]) -> bool:
    """Note the assertions that the reference does not satisfy with holes. Returns whether there are any."""
    kept = {path: set(places) for path, places in calibration.kept.items()}
    whole, function_of = set(calibration.whole), _function_of(test.dug.files)
    for (node, key, _, _), (reason, _) in zip(test.run.records, test.compared, strict=True):
        at = test.dug.places.get(key)
        if reason is not None and at is not None and calibration.names.get(node, node) in good:
            kept.setdefault(at[0], set()).add(at[1])
    passed = {calibration.names.get(node, node) for node in test.run.of_kind("passed")}
    for function in {function_of(node) for node in good - passed} | {function_of(node) for node in torn}:
        path = function.partition("::")[0]
        if path in test.dug.files:
            places = {each.place for each in test.dug.tests.get(function, [])}
            if places <= kept.setdefault(path, set()):
                whole.add(path)
            kept[path] |= places
    before = calibration.kept, calibration.whole
    calibration.kept, calibration.whole = {path: sorted(kept[path]) for path in sorted(kept)}, sorted(whole)
    return before != (calibration.kept, calibration.whole)


def _counts(test: TestRun) -> dict[str, dict[str, int]]:
    """Return the comparisons of each function; 0 where they may be more or fewer."""
    often = {(function, each.place) for function, several in test.dug.tests.items() for each in several if each.often}
    return {
        function: {p: 0 if (function, p.partition(" ")[0]) in often else number for p, number in places.items()}
        for function, places in test.counts().items()
    }


def _lengths(test: TestRun) -> dict[str, dict[str, int]]:
    lengths: dict[str, dict[str, int]] = {}
    for (_, key, _, _), (_, size) in zip(test.run.records, test.compared, strict=True):
        if size:
            path, place = test.dug.places[key]
            places = lengths.setdefault(path, {})
            places[place] = max(size, places.get(place, 0))
    return lengths


def rate(
    calibration: Calibration, good: set[str], reference: TestRun, null: TestRun, files: Mapping[str, str], seen: str
) -> set[str]:
    """Note the functions that had to turn and their trust, and return those whose assertion could be reversed.

    A function is blind if each of its nodes that had to turn has a strong hole: one row of parameters may have one, and
    another not.

    Args:
        good: the nodes that pass with the reference.
        reference, null: runs with the reference and on the untouched tree. A value that the tree gives proves nothing.
        files: the tests, path -> text.
        seen: the Python code that agents saw. The values of a test that stands there are known.
    """
    dug, counts, before = reference.dug, reference.counts_of_nodes(), null.counts_of_nodes()
    function_of, passing = _function_of(dug.files), set(map(null.original, null.passed))
    nodes: dict[str, list[str]] = defaultdict(list)
    for node in good - passing:
        nodes[function_of(node)].append(node)
    functions = Counter(map(function_of, good))
    calibration.turned = {function: functions[function] for function in sorted(nodes)}
    calibration.trust = dict.fromkeys(calibration.turned, UNCHALLENGED)

    def is_blind(function: str, node: str) -> bool:
        stable = calibration.counts.get(function, {})
        expected = {p: n if stable[p] else 0 for p, n in counts.get(node, {}).items() if p in stable}
        return dug.is_blind(function, _differences(expected, before.get(node, {})))

    reversible = set()
    for function in calibration.turned:
        path, _, name = function.partition("::")
        if all(is_blind(function, node) for node in nodes[function]) and source_of(files[path], name) not in seen:
            calibration.trust[function] = BLIND
        elif function in dug.reversible:
            reversible.add(function)
    return reversible
