"""A changed result fails and names its case; only a higher number whose line names the case lets its golden change."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.goldens.golden import (
    FLOATS,
    Golden,
    differences,
    fault,
    read_goldens,
    rewritten,
    stored_form,
    unpinned,
    values_of,
    write_goldens,
)

KEY = ("judge.x", "moved tests")
ONE = {"judge.x": {1: "verdicts"}}
RAISED = {"judge.x": {1: "verdicts", 2: "renamed files count (moved tests)"}}
ROWS = pa.table({"name": ["a", "b" * 60, "c"], "reward": [1.0, 0.5, None], "none": pa.nulls(3)})


def golden(result: Any, number: int = 1) -> Golden:
    return Golden(number, stored_form(values_of(result)))


def changed(result: Any) -> list[str]:
    """Return the columns that differ from those of ROWS."""
    return [line.partition(":")[0] for line in differences(golden(ROWS).columns, values_of(result))]


def test_equal_result_is_no_fault_whatever_the_number() -> None:
    for versions in (ONE, RAISED):
        assert fault(KEY, golden(ROWS), values_of(ROWS), versions) is None


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([{"name": "a", "reward": 1.0}, {"name": "b" * 61, "reward": 0.5}, {"name": "c"}], ["name"]),
        ([{"name": "a", "reward": 1.0}, {"name": "b" * 60, "reward": 0.51}, {"name": "c"}], ["reward ~"]),
        ([{"name": "a", "reward": 1.0}, {"name": "b" * 60}, {"name": "c", "reward": 0.5}], ["reward"]),
        ([{"name": "a", "reward": 1}, {"name": "b" * 60, "reward": 0.5}, {"name": "c"}], ["reward", "reward ~"]),
        ([{"name": "a", "reward": 1.0}, {"name": "b" * 60, "reward": 0.5}], ["name", "reward", "rows"]),
        (
            [{"name": "c"}, {"name": "b" * 60, "reward": 0.5}, {"name": "a", "reward": 1.0}],
            ["name", "reward", "reward ~"],
        ),
        (ROWS.append_column("more", pa.array([1, 2, 3])), ["more"]),
        (ROWS.drop_columns(["reward"]), ["reward", "reward ~"]),
    ],
    ids=["text", "float", "null elsewhere", "type", "row gone", "order", "column new", "column gone"],
)
def test_every_change_of_a_table_is_a_difference_of_its_columns(rows: Any, columns: list[str]) -> None:
    assert changed(rows) == columns


def test_columns_of_nulls_and_names_of_types_change_nothing() -> None:
    assert changed(ROWS.append_column("later", pa.nulls(3))) == []
    assert changed(ROWS.to_pylist()) == []


def test_failure_names_component_case_and_the_first_value_that_differs() -> None:
    rows = ROWS.to_pylist()
    rows[1]["name"] = "d" * 60
    problem = fault(KEY, golden(ROWS), values_of(rows), ONE)
    assert problem and "`judge.x`" in problem and "moved tests" in problem and "versions.toml" in problem
    assert "name: value 1" in problem and "ddd" in problem


@pytest.mark.parametrize("count", [3, FLOATS, 1000])
def test_floats_agree_within_rounding_and_not_beyond(count: int) -> None:
    values = np.sin(np.arange(count) + 1.0)
    before = golden({"x": values}).columns
    assert not differences(before, values_of({"x": values * (1 + 1e-5 * np.cos(np.arange(count)))}))
    assert not differences(before, values_of({"x": values.astype(np.float32)}))
    assert differences(before, values_of({"x": values * 1.001}))
    assert differences(before, values_of({"x": values[:-1]}))
    assert differences(before, values_of({"x": values[::-1]}))
    one = values.copy()
    one[count // 2] += 0.05
    assert differences(before, values_of({"x": one}))
    assert differences(before, values_of({"x": [*values[:-1].tolist(), float("nan")]}))


def test_values_of_every_kind_have_one_form() -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    values = values_of(
        {"set": {2, 1}, "bytes": b"\x01", "at": at, "array": np.arange(2), "tuple": (1, None), "none": None}
    )
    assert values == {"set": [1, 2], "bytes": ["01"], "at": [at.isoformat()], "array": [0, 1], "tuple": [1, None]}


def test_files_keep_goldens(tmp_path: Path) -> None:
    goldens = {KEY: golden(ROWS, 3), ("agent", "a"): golden({"text": "é", "x": 0.1})}
    write_goldens(goldens, tmp_path / "goldens.jsonl")
    assert read_goldens(tmp_path / "goldens.jsonl") == goldens
    assert read_goldens(tmp_path / "none.jsonl") == {}


# --- writing ----------------------------------------------------------------------------------------------------------

OTHER = {"name": ["another"]}


@pytest.mark.parametrize(
    "versions",
    [ONE, {"judge.x": {1: "verdicts", 2: "renamed files count"}}, {"judge.x": {1: "verdicts (moved tests)"}}, {}],
    ids=["no number", "a line that names no case", "a line of the old number", "no component"],
)
def test_changed_case_is_refused_without_a_higher_number_whose_line_names_it(versions) -> None:
    after, refusals = rewritten({KEY: golden(ROWS)}, {KEY: values_of(OTHER)}, versions)
    assert after == {} and len(refusals) == 1 and "moved tests" in refusals[0] and "judge.x" in refusals[0]


def test_changed_case_is_written_with_the_number_whose_line_names_it() -> None:
    after, refusals = rewritten({KEY: golden(ROWS)}, {KEY: values_of(OTHER)}, RAISED)
    assert (after, refusals) == ({KEY: golden(OTHER, 2)}, [])
    assert fault(KEY, after[KEY], values_of(OTHER), RAISED) is None
    # The same number serves no second change.
    assert rewritten(after, {KEY: values_of(ROWS)}, RAISED)[1]


def test_lowered_number_is_a_fault_and_is_refused() -> None:
    before = {KEY: golden(ROWS, 2)}
    assert fault(KEY, before[KEY], values_of(ROWS), RAISED) is None
    assert "raise it" in str(fault(KEY, before[KEY], values_of(ROWS), ONE))
    for result in (ROWS, OTHER):
        assert len(rewritten(before, {KEY: values_of(result)}, ONE)[1]) == 1


def test_new_and_gone_cases_need_no_number_and_equal_ones_keep_theirs() -> None:
    new = ("judge.x", "new")
    before = {KEY: golden(ROWS), ("judge.x", "gone"): golden(ROWS)}
    after, refusals = rewritten(before, {KEY: values_of(ROWS), new: values_of(OTHER)}, RAISED)
    assert refusals == [] and after == {KEY: golden(ROWS, 1), new: golden(OTHER, 2)}
    assert "make goldens" in str(fault(new, None, values_of(OTHER), RAISED))


def test_component_without_a_case_or_a_reason_is_named() -> None:
    assert list(unpinned(["a", "b", "c"], [("a", "x"), ("b", "x")], {"b": "none"})) == ["b has cases", "c has no case"]
