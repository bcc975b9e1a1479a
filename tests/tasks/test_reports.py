"""Parsers of test runners' output, which code under test may have written."""

from __future__ import annotations

import pytest

from etpi_assets.tasks.reports import counts, unittest_outcomes


def test_counts_of_each_runner() -> None:
    assert counts("Tests:       1 failed, 12 passed, 13 total") == (12, 1)
    assert counts("=== 1 failed, 2 passed, 1 error in 0.1s ===") == (2, 2)
    assert counts("--- PASS: TestA\n--- FAIL: TestB\n") == (1, 1)
    assert counts("ok  \tmoor\t0.1s\n") == (1, 0)


def test_unittest_outcomes_take_the_last_word_of_a_line() -> None:
    printed = (
        "test_a (m.C) ... ok\ntest_b (m.C) ... noise ... more FAIL\n"
        "test_c (m.C) ... skipped 'no'\ntest_d (m.C) ... expected failure\ntest_e (m.C) ... broken\n"
    )
    assert unittest_outcomes(printed) == {
        "test_a (m.C)": "PASSED",
        "test_b (m.C)": "FAILED",
        "test_c (m.C)": "SKIPPED",
        "test_d (m.C)": "PASSED",
    }


def test_unittest_outcome_may_come_lines_after_its_name() -> None:
    """As where Django's own output is flushed between them: 12 of 150 public logs of SWE-bench's harness have one."""
    printed = (
        "ok\ntest_a (m.C) ... System check identified no issues (0 silenced).\nok\ntest_b (m.C) ... Importing m\n"
        "  Applying m.0001_initial... OK\nFAIL\nok\ntest_c (m.C) ... cut\n"
    )
    assert unittest_outcomes(printed) == {"test_a (m.C)": "PASSED", "test_b (m.C)": "FAILED"}


@pytest.mark.parametrize("part", ["1", "a ... ", "Tests: 1", "Tests: ", " passed", "\x1b[1", "ok ", "FAILED a - ["])
def test_hostile_output_of_any_length_is_read(part: str) -> None:
    text = "short test summary info\n" + part * (300_000 // len(part))  # hours, if the time grew with its square
    assert counts(text)[1] == 0 and unittest_outcomes(text) == {}
