"""Holes instead of expected values: which values leave a test, which stay, and how the host compares."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.tasks import pytest_recorder, values
from etpi_assets.tasks.calibration import Calibration, TestRun, compared, rate, unlike_reference
from etpi_assets.tasks.family import is_trusted, weakest
from etpi_assets.tasks.graded_run import GradedRun, run_graded
from etpi_assets.tasks.holes import Holed, dig
from etpi_resources.sandboxes import CommandResult

SECRET = "918273645"


PATH = "tests/test_moor.py"
TEST_A = f"{PATH}::test_a"


def dug(body: str, **more: Any) -> Holed:
    return dig({PATH: f"import pytest\n{body}\n"}, "k_", **more)


@pytest.mark.parametrize(
    "body",
    [
        "def test_a():\n    assert rope(4) == 918273645",
        "def test_a():\n    assert 918273645 == rope(4), 'not 918273645'",
        "def test_a():\n    '''918273645'''\n    assert rope(4) == [{'a': (918273645,)}]  # 918273645",
        "def test_a():\n    assert '918273645' in rope(4)",
        "def test_a():\n    assert rope(4).startswith('918273645')",
        "def test_a():\n    assert rope(4) == approx(918273645, rel=0.1)",
        "def test_a():\n    assert x and rope(4) == Decimal('918273645')",
        "def test_a():\n    assert rope(4) == f'{n} 918273645'",
        "def test_a():\n    wanted = 918273645\n    assert rope(4) == wanted",
        "def test_a():\n    for n, wanted in [(4, 918273645)]:\n        assert rope(n) == wanted",
        "WANTED = 918273645\ndef test_a():\n    assert rope(4) == WANTED\ndef test_b():\n    assert knot(4) == WANTED",
        "@pytest.fixture\ndef wanted():\n    return 918273645\ndef test_a(wanted):\n    assert rope(4) == wanted",
        "def test_a():\n    with pytest.raises(ValueError, match='918273645'):\n        rope(4)",
        "class TestA(TestCase):\n    def test_a(self):\n        self.assertEqual(rope(4), 918273645)",
        "class TestA(TestCase):\n    def test_a(self):\n        self.assertTrue(rope(4) == 918273645)",
        "class TestA(TestCase):\n    def test_a(self):\n        with self.assertRaisesRegex(KeyError, '918273645'):\n"
        "            rope(4)",
        "@pytest.mark.parametrize('n, w', [(4, 918273645)], ids=['918273645'])\n"
        "def test_a(n, w):\n    assert rope(n) == w",
        "@pytest.mark.parametrize('n, w', [pytest.param(4, 918273645, id='918273645')])\ndef test_a(n, w):\n"
        "    assert rope(n) == w",
        "def test_a():\n    assert rope(4) == knot(4) + [918273645]",
        "async def test_a():\n    assert (await rope(4)) == 918273645",
        "class TestA(TestCase):\n    def test_a(self):\n        self.assertEqual(rope(4), 918273645, msg='918273645')",
        "class TestA(TestCase):\n    def test_a(self):\n        self.assertEqual(first=rope(4), second=918273645)",
        "class TestA(TestCase):\n    def test_a(self):\n        self.assertAlmostEqual(rope(4), 918273645, places=1)",
        "class TestA(TestCase):\n    def test_a(self):\n"
        "        self.assertSequenceEqual(rope(), [918273645], seq_type=list)",
        "class TestA(TestCase):\n    def test_a(self):\n        self.assertIn('918273645', container=rope(4), msg='x')",
        "class TestA(TestCase):\n    def test_a(self):\n        self.assertTrue(expr=rope(4) == 918273645)",
        "class TestA(TestCase):\n    def test_a(self):\n"
        "        with self.assertRaisesRegex(KeyError, expected_regex='918273645', msg='918273645'):\n"
        "            rope(4)",
        "def test_a():\n    with pytest.raises(expected_exception=KeyError, match='918273645'):\n        rope(4)",
    ],
)
def test_expected_value_leaves_the_test_which_is_blind(body: str) -> None:
    holed = dug(body)
    name = next(iter(holed.tests))
    assert SECRET not in holed.files[PATH] and holed.is_blind(name), holed
    assert SECRET in json.dumps([holed.holes, holed.cells])
    assert holed.files[PATH].count("\n") == body.count("\n") + 2 and ast.parse(holed.files[PATH])


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        ("assert rope(4) == knot(4)", ["pair"]),
        ("assert rope(4)", ["bit"]),
        ("assert not rope(4)", ["bit"]),
        ("assert rope(4) > 3", ["weak"]),
        ("assert rope(4) != 8", ["weak"]),
        ("assert rope(4) is None", ["value"]),
        ("assert rope(4) == 0", ["value"]),
        ("assert rope(4) == 0.0", ["value"]),
        ("assert rope(4) == approx(0, abs=0.25)", ["value"]),
        ("assert rope(4) == approx(knot(4), abs=0.25)", ["value"]),
        ("assert rope(4) == knot(4) + 79", ["value"]),
        ("assert rope(4) == knot(4) * 3", ["value"]),
        ("assert rope(4) == int(knot(4), 16)", ["value"]),
        ("assert rope(4) == f'{knot(4)}, {n}'", ["value"]),
        ("assert rope(4) in (8, 9)", ["value"]),
        ("assert 'ab' in rope(4)", ["value"]),
        ("assert 'warning' in rope(4)", ["value"]),
        ("assert b'(done)' in rope(4)", ["value"]),
        ("assert '12345' in rope(4)", ["value"]),
        ("with pytest.raises(ValueError, match='negative'):\n        rope(4)", ["value"]),
        ("self.assertAlmostEqual(rope(4), 8.5, delta=n)", ["kept"]),
        ("self.assertEqual(*rope(4))", []),
        ("with pytest.raises(ValueError):\n        rope(4)", ["value"]),
        ("with pytest.raises(ValueError, match='.+ [a-z ]+'):\n        rope(4)", ["value"]),
        ("with pytest.raises(ValueError, match='no knot|.*'):\n        rope(4)", ["value"]),
        ("wanted = 8\n    print(wanted)\n    assert rope(4) == wanted", ["kept"]),
        ("check(rope(4), 8)", []),
    ],
)
def test_test_that_others_than_the_expected_value_satisfy_is_not_blind(body: str, kinds: list[str]) -> None:
    holed = dug(f"def test_a():\n    {body}")
    assert [each.kind for each in holed.tests[TEST_A]] == kinds and not holed.is_blind(TEST_A)


@pytest.mark.parametrize(("expected", "kind"), [("{}", "value"), ("[{}, n]", "value"), ("{n: m}", "pair")])
def test_empty_dictionary_is_a_value_of_its_own(expected: str, kind: str) -> None:
    holed = dug(f"def test_a():\n    assert rope(4) == {expected}")
    assert [each.kind for each in holed.tests[TEST_A]] == [kind]
    assert (expected in holed.files[PATH]) is (kind == "pair")


@pytest.mark.parametrize(("status", "turned", "counts"), [(1, {TEST_A}, 0), (1, set(), 1), (2, {TEST_A}, 2)])
def test_exit_status_is_that_of_reversed_tests_only_if_some_were(status: int, turned: set[str], counts: int) -> None:
    assert TestRun(GradedRun("", status), turned_over=turned).exit_code == counts


def test_name_that_is_read_elsewhere_keeps_its_literal_and_the_test_is_not_blind() -> None:
    holed = dug("WANTED = 918273645\ndef test_a():\n    assert rope(WANTED) == WANTED\n    assert knot(1) == 77")
    assert SECRET in holed.files[PATH] and "77" not in holed.files[PATH] and not holed.is_blind(TEST_A)


@pytest.mark.parametrize(
    ("body", "reversed_"),
    [
        ("assert rope(4) == knot(4)", "assert not (rope(4) == knot(4))"),
        ("assert rope(4)", "assert not (rope(4))"),
        ("assert rope(4) and knot(4)", "assert not (rope(4) and knot(4))"),
        ("self.assertIn(a, rope(4))", "self.assertNotIn(a, rope(4))"),
        ("assert rope(4) is None", "assert not (rope(4) is None)"),
        ("assert rope(4) == 918273645", None),
        ("assert 'ab' in rope(4)", None),
        ("if x:\n        return\n    assert rope(4)", None),
    ],
)
def test_assertion_is_reversed_where_that_shows_no_value(body: str, reversed_: str | None) -> None:
    body = f"def test_a():\n    {body}"
    assert dug(body).reversible == ({TEST_A} if reversed_ else set())
    if reversed_:
        wanted = f"import pytest\ndef test_a():\n    {reversed_}\n"
        assert ast.dump(ast.parse(dug(body, reverse=[TEST_A]).files[PATH])) == ast.dump(ast.parse(wanted))


def test_real_test_files_keep_their_lines_and_parse() -> None:
    for path in sorted(Path(__file__).parents[1].glob("c[ou]*/test_*.py"))[:40]:
        text = path.read_text()
        holed = dig({PATH: text}, "k_").files[PATH]
        assert holed.count("\n") == text.count("\n") and ast.parse(holed) and holed != text, path


def test_assertion_that_no_hole_fits_keeps_its_literal() -> None:
    text = "def test_a():\n    assert rope(4) == [Knot(), 918273645]\n"
    (assertion,) = dug(text).tests[TEST_A]
    kept = dug(text, kept={PATH: [assertion.place]})
    assert SECRET in kept.files[PATH] and [each.kind for each in kept.tests[TEST_A]] == ["kept"]


def hole(op: str, expected: str, *, flip: bool = False, **options: str) -> dict[str, Any]:
    return {"op": op, "expected": expected, "flip": flip, "longest": 20, "options": options}


RAISES = {"op": "raises", "expected": "'no .*'", "classes": ["KeyError"]}


@pytest.mark.parametrize(
    ("hole_", "recorded", "agrees"),
    [
        (hole("==", "8"), ["0x8"], True),
        (hole("==", "8"), ["float('8.0')"], True),
        (hole("==", "8"), ["Opaque('V')"], False),
        (hole("==", "8"), ["'8'"], False),
        (hole("==", "8"), ["Cell('c')"], False),
        (hole("==", "8"), ["_l[0]"], False),
        (hole("==", "8"), ["approx(8)"], False),
        (hole("==", "_l[0]"), ["0x6", "Cell('c')"], True),
        (hole("==", "[_l[0], 2]"), ["list([0x1, 0x2])", "0x1"], True),
        (hole("==", "{'a': (1, 2)}"), ["{'a': tuple([0x1, 0x2])}"], True),
        (hole("in", "'known'", flip=True), ["'it is known'"], True),
        (hole("in", "'known'", flip=True), [repr("known" + "x" * 5000)], False),
        (hole("in", "(8, 9)"), ["0x8"], True),
        (hole("in", "'known'", flip=True), ["list(['known', 'so'])"], True),
        (hole("in", "'known'", flip=True), ["list(['known', " + "'word', " * 99 + "])"], False),
        (hole("in", "'known'", flip=True), ["{'known': 1, '" + "x" * 500 + "': 2}"], False),
        (hole("==", "approx(1.0)"), ["float('1.0000001')"], True),
        (hole("==", "approx([1.0, 2])"), ["list([float('1.1'), 0x2])"], False),
        (hole("==", "approx(float('nan'), nan_ok=True)"), ["float('nan')"], True),
        (hole("==", "approx(float('nan'))"), ["float('nan')"], False),
        (hole("count", "[1, 2]"), ["list([0x2, 0x1])"], True),
        (hole("almost", "1.0"), ["float('1.00000001')"], True),
        (hole("almost", "1.0"), ["float('1.001')"], False),
        (hole("almost", "1.0", places="2"), ["float('1.001')"], True),
        (hole("almost", "5", delta="2"), ["0x7"], True),
        (hole("almost", "5", delta="2"), ["0x8"], False),
        (RAISES, ["list(['KeyError'])", "'no x'"], True),
        (RAISES, ["list(['Boom'])", "'no x'"], False),
        (hole("is", "True"), ["True"], True),
        (hole("is", "False"), ["True"], False),
        (hole("is", "True"), ["0x1"], False),
        (hole("==", "8"), ["0xzz"], False),
        (hole("==", "8"), ["exec('x')"], False),
        (hole("==", "date(2024, 1, 2)"), ["date('2024-01-02')"], True),
        (hole("==", "exec('x')"), ["None"], False),
    ],
)
def test_host_compares_as_python_does_and_believes_no_object(hole_, recorded, agrees) -> None:
    assert (values.compare(hole_, recorded, {"c": "6"})[0] is None) == agrees


@pytest.mark.parametrize(
    "value",
    [
        None, True, -7, 2.5, float("inf"), 1 + 2j, "a'\n\ud800", b"\x00'", bytearray(b"a"), range(1, 9, 2),
        {1: (2, [3])}, {4}, frozenset([5]), Decimal("1.50"), Fraction(1, 3), timedelta(1, 2, 3), date(2024, 1, 2),
        datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=UTC), time(1, 2),
    ],
    ids=str,
)  # fmt: skip
def test_host_reads_the_value_that_was_recorded(value: Any) -> None:
    read = values.decoded(pytest_recorder.source(value, [1000]), None)
    assert type(read) is type(value) and read == value


class Day(date):
    """A subclass that is equal to the date that it is."""


def test_views_of_keys_and_subclasses_of_dates_are_plain_data() -> None:
    aware = datetime(2024, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    for value in ({"a": 1}.keys(), Day(2024, 1, 2), aware):
        assert values.decoded(pytest_recorder.source(value, [1000]), None) == value


def test_values_that_take_all_memory_or_time_end_the_comparison_alone() -> None:
    bomb = {"holes": {"k": hole("==", "'a' * _l[0]")}, "cells": {}}
    bomb["records"] = [["k", ["''", "0xffffffffff"]], ["k", ["''", "0x0"]]]
    command = [sys.executable, "-I", values.__file__, "20"]
    done = subprocess.run(command, input=json.dumps(bomb), capture_output=True, text=True, check=True)
    (first, _), (second, _) = json.loads(done.stdout)
    assert first and "MemoryError" in first and second is None


TESTS = "def test_a():\n    assert rope(4) == 8\n\n\ndef test_b():\n    assert rope(5) == 10\n"
NODES = [TEST_A, f"{PATH}::test_b"]


def claimed(holed: Holed, numbers: list[int], kinds: list[str] | None = None) -> GradedRun:
    """A run whose tests compare their holes with these numbers."""
    outcomes = dict(zip(NODES, kinds or ["passed", "passed"], strict=True))
    records = [(node, key, [hex(n)], 1) for node, key, n in zip(NODES, holed.holes, numbers, strict=False)]
    return GradedRun("", 0, False, NODES, outcomes, records)


def test_wrong_missing_and_repeated_comparisons_fail_their_test() -> None:
    holed = dig({PATH: TESTS}, "k_")
    places = [holed.places[key][1] for key in holed.holes]
    counts = {node: {place: 1} for node, place in zip(NODES, places, strict=True)}
    calibration = Calibration(counts=counts, turned=dict.fromkeys(NODES, 1))
    right = compared(claimed(holed, [8, 10]), holed, calibration)
    assert not right.failed and unlike_reference(calibration, right) is None
    assert [*compared(claimed(holed, [8, 8]), holed, calibration).failed] == NODES[1:]
    silent = compared(claimed(holed, [8]), holed, calibration)
    assert [*silent.failed] == NODES[1:] and unlike_reference(calibration, silent)
    skipped = compared(claimed(holed, [8, 10], ["passed", "skipped"]), holed, calibration)
    assert "test_b" in (unlike_reference(calibration, skipped) or "")


@pytest.mark.parametrize(
    ("records", "failing"),
    [
        ([(NODES[0], 0, 8), (NODES[1], 1, 10)], set()),
        ([(NODES[0], 0, 8), (f"{NODES[1]}[none]", 1, 9)], {NODES[1]}),
        ([(NODES[0], 0, 8), (f"./{NODES[1]}", 1, 9), (f"./{NODES[1]}", 1, 10)], {NODES[1]}),
        ([(NODES[0], 0, 8), (NODES[1], 2, 6)], {NODES[1]}),
    ],
    ids=["right", "wrong under a node that no test has", "guesses under another name", "a hole of another file"],
)
def test_only_agreeing_values_of_its_own_holes_are_comparisons_of_a_test(records, failing) -> None:
    """The third hole, of another file, has the place of the second."""
    holed = dig({PATH: TESTS, "tests/test_other.py": TESTS.replace("10", "6").replace("rope(4) == 8", "rope")}, "k_")
    keys = [key for key in holed.holes if holed.holes[key]["expected"] != "True"]
    counts = {node: {holed.places[key][1]: 1} for node, key in zip(NODES, keys, strict=False)}
    claims = [(node, keys[at], [hex(n)], 1) for node, at, n in records]
    run = GradedRun("", 0, False, NODES, dict.fromkeys(NODES, "passed"), claims)
    test = compared(run, holed, Calibration(counts=counts, turned={NODES[0]: 1}))
    assert {*test.failed} & {*NODES} == failing and test.agrees == (not failing)


def test_report_without_a_test_that_passed_before_is_no_pass() -> None:
    holed = dig({PATH: TESTS}, "k_")
    counts = {node: {holed.places[key][1]: 1} for node, key in zip(NODES, holed.holes, strict=True)}
    run = replace(claimed(holed, [8]), outcomes={NODES[0]: "passed"}, collected=NODES[:1])
    assert not compared(run, holed, Calibration(counts=counts, turned={NODES[0]: 1})).agrees


def trust_of(text: str, good: list[tuple[str, str, int]], null: list[tuple[str, str, int]], visible: str = "") -> str:
    """The trust of TEST_A, whose nodes in `good` had to turn. Comparisons: (node, value, hole or cell)."""
    holed = dig({PATH: text}, "k_")
    keys, cells = list(holed.holes), list(holed.cells)

    def run(comparisons: list[tuple[str, str, int]], kind: str) -> GradedRun:
        records = [(n, keys[0], [v, f"Cell({cells[at]!r})"] if cells else [v], 1) for n, v, at in comparisons]
        return GradedRun("", 0, records=records, outcomes={node: kind for node, *_ in comparisons})

    plain = compared(run(good, "passed"), holed, Calibration())
    nodes = {node for node, *_ in good}
    calibration = Calibration(counts={TEST_A: dict(plain.counts()[TEST_A])})
    untouched = compared(run(null, "failed"), holed, calibration)
    rate(calibration, nodes, plain, untouched, {PATH: text}, visible)
    return calibration.trust[TEST_A]


def test_value_that_the_untouched_tree_gives_and_rows_that_agents_saw_prove_nothing() -> None:
    rows = "import pytest\n@pytest.mark.parametrize('n', [4, 5])\n"
    text = f"{rows}def test_a(n):\n    assert rope(n) == 80\n    assert knot(n)\n"
    good = [(TEST_A, "0x50", 0)]
    assert trust_of(text, good, [(TEST_A, "0x0", 0)]) == "blind"
    assert trust_of(text, good, good) == "unchallenged"
    assert trust_of(text, good, [], text) == "unchallenged"
    assert trust_of(text, good, [], text.replace("4, 5", "4")) == "blind"


@pytest.mark.parametrize(
    ("values_", "turned", "trust"),
    [
        ("80, 90", [0, 1], "blind"),
        ("80, None", [0, 1], "unchallenged"),
        ("80, None", [0], "blind"),
        ("80, 0", [1], "unchallenged"),
        ("80, True", [0, 1], "unchallenged"),
    ],
)
def test_each_row_of_parameters_that_had_to_turn_needs_a_value_that_is_not_guessed(
    values_: str, turned: list[int], trust: str
) -> None:
    values_of = values_.split(", ")
    rows = ", ".join(f"({n}, {value})" for n, value in enumerate(values_of))
    text = f"import pytest\n@pytest.mark.parametrize('n, w', [{rows}])\ndef test_a(n, w):\n    assert rope(n) == w\n"
    good = [(f"{TEST_A}[{at}-w{at}]", values_of[at], at) for at in turned]
    assert trust_of(text, good, []) == trust


def test_trust_is_ordered_and_unknown_words_are_weakest() -> None:
    assert weakest(["blind", "reversed"]) == "reversed" and weakest([]) == "unchallenged"
    assert is_trusted("blind", "reversed") and not is_trusted("unchallenged", "reversed")
    assert is_trusted(None, None) and not is_trusted("shared_process", "unchallenged")


class Recording:
    """A sandbox that runs nothing and keeps all that enters it."""

    def __init__(self) -> None:
        self.entered: list[str] = []

    def write_files(self, files: dict[str, str]) -> None:
        self.entered += [*files, *files.values()]

    def run(self, command: str, *, timeout: float | None = None) -> CommandResult:
        self.entered.append(command)
        return CommandResult("", 0, 0.0)


def test_recorder_brings_no_value_into_the_sandbox_and_a_run_without_its_report_is_no_pass() -> None:
    sandbox: Any = Recording()
    run = run_graded(sandbox, "pytest", roots=["src"], plugins=["timeout"])
    assert run.problem and "no report" in run.problem and SECRET not in "".join(sandbox.entered)
