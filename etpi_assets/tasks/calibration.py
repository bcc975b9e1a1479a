"""A calibration of hidden tests by their reference solution, and the comparison of a run's records with it.

A run of tests with holes (`holes`) records values; `compared` compares them outside the sandbox, and their numbers with
those of the reference. A calibration notes which assertions can have holes, and how far each test can be trusted.
"""

from __future__ import annotations

import json
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
        failed: node ids that fail by what was recorded -> the reason.
        turned_over, cheated: node ids with a reversed assertion that failed, and that passed.
        dug: path -> the file with holes.
        reasons, sizes: of each record, as `values` says.
    """

    __test__: ClassVar[bool] = False  # for pytest
    run: GradedRun
    calibration: Calibration = field(default_factory=Calibration)
    failed: dict[str, str] = field(default_factory=dict)
    turned_over: set[str] = field(default_factory=set)
    cheated: list[str] = field(default_factory=list)
    dug: Mapping[str, Holed] = field(default_factory=dict)
    reasons: Sequence[str | None] = ()
    sizes: Sequence[int] = ()

    @property
    def output(self) -> str:
        return self.run.output

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

    def outcomes(self) -> Outcomes:
        """Return the outcomes after the comparison, by the names and words of a summary of the original tests."""
        return {self.original(node): _WORDS[kind] for node, kind in self.kinds().items() if kind in _WORDS}

    def place_of(self, key: str) -> tuple[str, str] | None:
        """Return (path, place) of a hole or cell; None for a key that is none."""
        return next(((path, holed.places[key]) for path, holed in self.dug.items() if key in holed.places), None)

    def counts(self) -> dict[str, Counter[str]]:
        """Return function -> place of a hole, with the places of the cells expected there -> comparisons."""
        function_of = _function_of(self.dug)
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for node, key, values, number in self.run.records:
            cells = [v[1] for v in values[1:] if isinstance(v, list) and v[:1] == ["cell"] and isinstance(v[1], str)]
            places = [(self.place_of(each) or ("", "?"))[1] for each in [key, *cells]]
            counts[function_of(node)][" ".join(places)] += number
        return counts


def dig_files(files: Mapping[str, str], calibration: Calibration, reverse: Collection[str] = ()) -> dict[str, Holed]:
    """Return the Python files with holes."""
    dug = {}
    for path, text in files.items():
        if path.endswith(".py") and path not in calibration.whole:
            chosen = [name.removeprefix(f"{path}::") for name in reverse if name.startswith(f"{path}::")]
            dug[path] = dig(text, f"k{secrets.token_hex(5)}_", calibration.kept.get(path, ()), chosen)
    return dug


def compared(
    run: GradedRun, dug: Mapping[str, Holed], calibration: Calibration, reverse: Collection[str] = ()
) -> TestRun:
    """Compare a run's records with the expected values, and their numbers with those of the reference."""
    reasons, sizes = _compare(run, dug, calibration)
    result = TestRun(run, calibration, dug=dug, reasons=reasons, sizes=sizes)
    for (node, *_), reason in zip(run.records, reasons, strict=True):
        if reason is not None:
            result.failed.setdefault(node, reason)
    counts, function_of, wrong = result.counts(), _function_of(dug), defaultdict[str, list[str]](list)
    for function, expected in calibration.counts.items():
        wrong[function] = _differences(expected, counts.get(function, {}))
    for node, kind in run.outcomes.items():
        function = function_of(node)
        if function in reverse:
            if kind == "passed":
                result.cheated.append(node)
            elif kind == "failed":
                result.turned_over.add(node)
        elif wrong[function]:
            result.failed.setdefault(node, f"comparisons at {wrong[function]}")
    return result


def _differences(expected: Mapping[str, int], counts: Mapping[str, int]) -> list[str]:
    """Return places that were compared more or less often than with the reference; where it is 0, not at all."""
    return sorted(p for p, n in expected.items() if (counts.get(p, 0) != n if n else not counts.get(p, 0)))


def _compare(run: GradedRun, dug: Mapping[str, Holed], calibration: Calibration) -> tuple[list[str | None], list[int]]:
    """Return (the reason why each record disagrees or None, the length of each text that is searched)."""
    holes = {key: hole for holed in dug.values() for key, hole in holed.holes.items()}
    known = [at for at, (_, key, _, _) in enumerate(run.records) if key in holes]
    request = {
        "holes": holes,
        "cells": {key: literal for holed in dug.values() for key, literal in holed.cells.items()},
        "lengths": {
            key: calibration.lengths[path][place]
            for path, holed in dug.items()
            for key, place in holed.places.items()
            if place in calibration.lengths.get(path, ())
        },
        "records": [run.records[at][1:3] for at in known],
    }
    reasons: list[str | None] = ["no such hole"] * len(run.records)
    sizes = [0] * len(run.records)
    if known:
        done = subprocess.run(
            [sys.executable, "-I", str(_VALUES), str(_COMPARE_SECONDS)],
            input=json.dumps(request), capture_output=True, text=True, check=False, cwd="/", env={},
        )  # fmt: skip
        answer = json.loads(done.stdout) if done.returncode == 0 else None
        for number, at in enumerate(known):
            reasons[at], sizes[at] = (answer[0][number], answer[1][number]) if answer else ("cannot be compared", 0)
    return reasons, sizes


def reversals(test: TestRun) -> Counter[str]:
    """Return function -> number of its nodes whose reversed assertion failed."""
    return Counter(map(_function_of(test.dug), test.turned_over))


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
        if not _fit(calibration, test, good, torn) or not test.dug:
            break
        if runs > _CALIBRATIONS:
            calibration = Calibration(whole=sorted(test.dug))
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
    whole, function_of = set(calibration.whole), _function_of(test.dug)
    for (node, key, _, _), reason in zip(test.run.records, test.reasons, strict=True):
        at = test.place_of(key)
        if reason is not None and at is not None and calibration.names.get(node, node) in good:
            kept.setdefault(at[0], set()).add(at[1])
    passed = {calibration.names.get(node, node) for node in test.run.of_kind("passed")}
    for function in {function_of(node) for node in good - passed} | {function_of(node) for node in torn}:
        path, _, name = function.partition("::")
        if path in test.dug:
            places = {each.place for each in test.dug[path].tests.get(name, [])}
            if places <= kept.setdefault(path, set()):
                whole.add(path)
            kept[path] |= places
    before = calibration.kept, calibration.whole
    calibration.kept, calibration.whole = {path: sorted(kept[path]) for path in sorted(kept)}, sorted(whole)
    return before != (calibration.kept, calibration.whole)


def _counts(test: TestRun) -> dict[str, dict[str, int]]:
    """Return the comparisons of each function; 0 where they may be more or fewer."""
    often = {
        (f"{path}::{name}", each.place)
        for path, holed in test.dug.items() for name, several in holed.tests.items() for each in several if each.often
    }  # fmt: skip
    return {
        function: {p: 0 if (function, _assertion(p)) in often else number for p, number in places.items()}
        for function, places in test.counts().items()
    }


def _assertion(place: str) -> str:
    """Return the place of the assertion that a hole, with cells, is in."""
    return place.partition(" ")[0]


def _lengths(test: TestRun) -> dict[str, dict[str, int]]:
    lengths: dict[str, dict[str, int]] = {}
    for (_, key, _, _), size in zip(test.run.records, test.sizes, strict=True):
        if size and (at := test.place_of(key)):
            places = lengths.setdefault(at[0], {})
            places[at[1]] = max(size, places.get(at[1], 0))
    return lengths


def rate(calibration: Calibration, good: set[str], null: TestRun) -> None:
    """Note the functions of which a node does not pass in the untouched tree."""
    function_of = _function_of(null.dug)
    passing = set(map(null.original, null.passed))
    functions = Counter(function_of(node) for node in good)
    turned = {function_of(node) for node in good - passing}
    calibration.turned = {function: functions[function] for function in sorted(turned)}


def note_trust(calibration: Calibration, files: Mapping[str, str], visible: Mapping[str, str]) -> set[str]:
    """Note the trust of each function that had to turn, and return those whose assertion could be reversed.

    Args:
        files: the tests, path -> text.
        visible: the files that agents saw. The values of a test that stands there are known.
    """
    dug = dig_files(files, calibration)
    seen = "\n".join(text for path, text in visible.items() if path.endswith(".py"))
    calibration.trust = dict.fromkeys(calibration.turned, UNCHALLENGED)
    reversible = set()
    for function in calibration.turned:
        path, _, name = function.partition("::")
        if (holed := dug.get(path)) is None:
            continue
        compared_at = {_assertion(place) for place in calibration.counts.get(function, {})}
        strong = any(each.strong and each.place in compared_at for each in holed.tests.get(name, []))
        if strong and holed.is_blind(name) and source_of(files[path], name) not in seen:
            calibration.trust[function] = BLIND
        elif name in holed.reversible:
            reversible.add(function)
    return reversible
