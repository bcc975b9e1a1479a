"""`etpi sql`: reports, files and text on the catalog, in every format, and DuckDB's shell."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from etpi import cli
from etpi.query import command, output
from etpi.query.command import QueryError, Question, find, parse_values, reports
from etpi.query.output import table
from etpi_assets.graph import GRAPH
from etpi_resources.lake import catalog
from tests.support import small_lake

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lake = small_lake.make(tmp_path_factory.mktemp("asked") / "data")
    return catalog.build(lake, GRAPH.values(), vocabularies={"tiny": [f"<{number}>" for number in range(50)]})


@pytest.fixture
def asked(built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETPI_CATALOG", str(built))
    return built


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["sql", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_report_by_name_takes_its_variables(asked, capsys):
    code, out, _ = _run(capsys, "turns_behind_a_checkpoint", "checkpoint=sft1")
    lines = out.splitlines()
    assert code == 0 and lines[-1] == "(5 rows)" and set(lines[1]) == {"-"}
    assert "instruction" in lines[0].split() and out.count("fold the lantern") == 5
    assert _run(capsys, "turns_behind_a_checkpoint", "checkpoint=none")[1].endswith("(0 rows)\n")


def test_unknown_experiment_of_a_report_is_an_error(asked, capsys):
    code, out, error = _run(capsys, "pass_at_k", "experiment=no_such")
    assert code == 1 and not out and "no_such" in error


def test_every_report_is_listed_with_its_question_and_the_variables_that_it_reads(capsys):
    code, out, _ = _run(capsys, "--list")
    assert code == 0 and len(out.splitlines()) == 2 * len(reports())
    assert "\npass_at_k  rollout_set= experiment=\n" in out
    assert "asked" not in find("tokens_of_a_turn").variables, "the report sets it itself"
    assert set(find("tokens_of_a_turn").variables) == {"rollout", "tokenizer", "turn", "agent"}


def test_file_and_text_run_with_typed_variables(asked, tmp_path, capsys):
    file = tmp_path / "own.sql"
    file.write_text("SELECT typeof(getvariable('a')) AS kind, getvariable('a') AS value;\n")
    for given, kind, value in [
        ("a=7", "INTEGER", 7), ("a=0.5", "DOUBLE", 0.5), ("a=true", "BOOLEAN", True), ("a='7'", "VARCHAR", "7"),
        ("a=007", "VARCHAR", "007"), ("a=x=y", "VARCHAR", "x=y"),
    ]:  # fmt: skip
        _, out, _ = _run(capsys, str(file), given, "--format", "json")
        assert json.loads(out) == [{"kind": kind, "value": value}]
    _, out, _ = _run(capsys, "-c", "SET VARIABLE b = 2; SELECT getvariable('a') + getvariable('b') AS s", "a=1")
    assert out.splitlines()[2].strip() == "3"


def test_formats_hold_null_lists_times_and_separators(asked, capsys):
    query = """SELECT NULL AS n, [1, 2] AS l, TIMESTAMPTZ '2026-01-02 03:04:05+02' AS t, 'a|b,"c"' AS s,
        'nan'::DOUBLE AS x"""
    _, out, _ = _run(capsys, "-c", query, "--format", "csv")
    assert list(csv.reader(io.StringIO(out))) == [
        ["n", "l", "t", "s", "x"], ["", "[1, 2]", "2026-01-02T01:04:05+00:00", 'a|b,"c"', ""],
    ]  # fmt: skip
    _, out, _ = _run(capsys, "-c", query, "--format", "json")
    assert json.loads(out) == [{"n": None, "l": [1, 2], "t": "2026-01-02T01:04:05+00:00", "s": 'a|b,"c"', "x": None}]
    _, out, _ = _run(capsys, "-c", query, "--format", "markdown")
    assert out.splitlines()[0] == "| n | l | t | s | x |" and "a\\|b" in out.splitlines()[2]


def test_table_wider_than_the_terminal_has_a_block_for_each_row():
    names, rows = ["first", "long_name"], [["a" * 30, 1], ["b" * 30, 2.5]]
    assert table(names, rows, 60).splitlines()[0].split() == names
    blocks = table(names, rows, 35).splitlines()
    assert blocks[:3] == ["-- row 1 --", f"    first  {'a' * 23}…", "long_name  1"] and max(map(len, blocks)) <= 35
    assert "a" * 30 in table(names, rows, None), "without a terminal nothing is cut"


def test_a_text_of_a_transcript_does_not_control_the_terminal():
    hostile = "\x1b]0;title\x07\x9b31mred\u202eabc\r"
    for width in (None, 200, 20):
        printed = table(["text", "\x1b[2J"], [[hostile, 1]], width)
        assert not set(printed) & set("\x1b\x07\x9b\u202e\r") and "\\x1b]0;" in printed


@pytest.mark.parametrize("format", ["csv", "json", "markdown"])
def test_no_format_writes_control_characters(format):
    hostile = "\x1b]0;title\x07\x7f\x9b31mred\u202eabc\r"
    printed = output.FORMATS[format](["text", "\x1b[2J"], [[hostile, 1], [[hostile], 2]])
    assert not set(printed) & set("\x1b\x07\x7f\x9b\u202e\r")
    if format == "json":
        assert json.loads(printed)[0]["text"] == hostile


def test_json_refuses_two_columns_of_one_name(asked, capsys):
    code, out, err = _run(capsys, "-c", "SELECT 1 AS a, 2 AS a", "--format", "json")
    assert (code, out) == (1, "") and "several columns are named a" in err


def test_catalog_cannot_be_written_and_errors_are_one_message(asked, capsys):
    code, _, err = _run(capsys, "-c", "CREATE TABLE mine (x INTEGER)")
    assert code == 1 and "read-only" in err and err.startswith("etpi: -c: ")
    code, _, err = _run(capsys, "pass_at")
    assert code == 1 and "Did you mean 'pass_at_k'" in err
    code, _, err = _run(capsys, "pass_at_k", "set=x")
    assert code == 1 and "it reads rollout_set, experiment" in err
    with pytest.raises(QueryError, match="name=value"):
        parse_values(("experiment",), Question("q", "SELECT getvariable('experiment')"))


def test_missing_catalog_is_said_before_anything_opens(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ETPI_CATALOG", str(tmp_path / "none.duckdb"))
    for arguments in ((), ("pass_at_k",)):
        code, _, err = _run(capsys, *arguments)
        assert code == 1 and "there is no catalog at" in err


def test_catalog_that_another_program_writes_is_one_line_that_names_it(built, tmp_path, monkeypatch, capsys):
    held = tmp_path / "etpi.duckdb"
    shutil.copy(built, held)
    monkeypatch.setenv("ETPI_CATALOG", str(held))
    hold = f"import duckdb, sys; held = duckdb.connect({str(held)!r}); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=-1, text=True) as writer:
        assert writer.stdout and writer.stdout.readline() == "open\n"
        for arguments in ((), ("pass_at_k",), ("-c", "SELECT 1")):
            code, out, err = _run(capsys, *arguments)
            assert (code, out) == (1, "") and len(err.splitlines()) == 1
            assert str(writer.pid) in err and "Close that program" in err and "-readonly etpi.duckdb" in err
    assert _run(capsys, "-c", "SELECT 1")[0] == 0


def test_damaged_catalog_is_one_line_with_the_remedy(tmp_path, monkeypatch, capsys):
    file = tmp_path / "etpi.duckdb"
    file.write_bytes(b"no catalog" * 1000)
    monkeypatch.setenv("ETPI_CATALOG", str(file))
    code, out, err = _run(capsys, "-c", "SELECT 1")
    assert (code, out) == (1, "") and "cannot be opened" in err and "etpi run catalog" in err


def _files(folder: Path) -> list[tuple[Path, int]]:
    return sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO '{lake}/new.parquet'",
        "COPY turns TO '{outside}/new.csv'",
        "EXPORT DATABASE '{outside}/new'",
        "ATTACH '{outside}/new.db'",
        "LOAD httpfs",
        "INSTALL httpfs",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{lake}/new.csv'",
        "-- x\nEXPLAIN ANALYZE COPY (SELECT 1) TO '{lake}/new.csv'",
        "EXPLAIN (ANALYZE, FORMAT json) COPY (SELECT 1) TO '{lake}/new.csv'",
        "SELECT 1; COPY (SELECT 1) TO '{lake}/new.csv'",
        "PREPARE p AS COPY (SELECT 1) TO '{lake}/new.csv'; EXECUTE p",
        "CALL enable_logging(storage = 'file', storage_path = '{lake}/new')",
        "SET profiling_output = '{lake}/new'",
        "PRAGMA profiling_output = '{lake}/new'",
        "SET enable_external_access = true; FROM '{outside}/a.csv'",
        "FROM '{outside}/a.csv'",
        "FROM '{lake}/../../a.csv'",
        "FROM read_text('{outside}/a.csv')",
        "FROM glob('{outside}/*')",
        "FROM sniff_csv('{outside}/a.csv')",
        "FROM 'https://localhost:1/a.csv'",
        "DROP VIEW turns",
        "DELETE FROM reports",
        "CREATE TABLE new AS SELECT 1",
        "CREATE PERSISTENT SECRET new (TYPE s3)",
        "CREATE TEMP TABLE a AS FROM '{outside}/a.csv'",
    ],
)
def test_query_opens_no_file_outside_the_lake_and_writes_none(query, asked, capsys):
    folder = asked.parent
    (folder / "a.csv").write_text("a\n1\n")
    before = _files(folder)
    code, out, err = _run(capsys, "-c", query.format(lake=folder / "data", outside=folder))
    assert (code, out) == (1, "") and "Traceback" not in err
    assert _files(folder) == before


def test_queries_that_read_are_answered(asked, capsys):
    for query in (
        "EXPLAIN SELECT count(*) FROM turns",
        "-- a question\nEXPLAIN ANALYZE FROM turns",
        "DESCRIBE turns",
        "SHOW TABLES",
        "SUMMARIZE turns",
        "CREATE TEMP TABLE a AS SELECT 1 AS b; FROM a",
        "CREATE TEMP MACRO f(x) AS x + 1; SELECT f(1)",
        "PIVOT turns ON agent_id USING count(*) GROUP BY rollout_id",
        "SET VARIABLE a = 1; SELECT getvariable('a')",
    ):
        code, out, err = _run(capsys, "-c", query)
        assert code == 0 and out, err


def test_shell_reads_the_catalog_in_utc_and_cannot_write(built):
    (built.parent / "a.csv").write_text("a\n1\n")
    before = _files(built.parent)
    others = [f"FROM '{built.parent}/a.csv';", f"COPY (SELECT 1) TO '{built.parent}/new.csv';", ".shell echo ran"]
    typed = "\n".join([*others, f".output {built.parent}/new.txt", "SELECT 'still here' AS answer;", ""])
    typed += "SELECT current_setting('TimeZone') AS zone, count(*) > 0 AS full FROM turns;\nDROP VIEW turns;\n"
    environment = {**os.environ, "ETPI_CATALOG": str(built), "TZ": "Asia/Tokyo"}
    shown = subprocess.run(
        [sys.executable, "-m", "etpi", "sql"], input=typed, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert "UTC" in shown.stdout and "true" in shown.stdout and "still here" in shown.stdout, shown.stderr
    assert "ran" not in shown.stdout.split() and _files(built.parent) == before
    assert "read-only" in shown.stderr


def test_missing_shell_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(command.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(QueryError, match="pip install duckdb-cli"):
        command.find_shell()
    beside = tmp_path / "duckdb"
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    assert command.find_shell() == str(beside)


def test_title_of_a_report_ends_with_a_sentence():
    assert Question("a", "-- Which ones fail? And why.\n-- More of it.\nSELECT 1").title == "Which ones fail? And why."
    assert Question("a", "-- Which ones fail? For those\n-- that ran.\nSELECT 1").title == "Which ones fail?"
    assert (
        Question("a", "-- Which ones of all that\n-- ran fail? None.\nSELECT 1").title
        == "Which ones of all that ran fail?"
    )
    assert all(question.title.endswith(("?", ".")) for question in reports().values())
