"""The work of `etpi sql`: run a question on the catalog and print its result, list the reports, or open the shell."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import duckdb

from etpi.query import QueryError, output
from etpi.run import columns
from etpi_assets.specs.plugins import near
from etpi_resources.inside import read_text
from etpi_resources.lake.catalog import connect, default_path
from etpi_resources.lake.questions import Question, reports

SHELL = "duckdb"
_FILE = re.compile(r"'((?:[^']|'')+\.parquet)'")
_EXPLAIN = re.compile(r"(?:\s|--[^\n]*\n)*EXPLAIN\b(?:\s+ANALYZE\b)?(?:\s*\([^()]*\))?", re.IGNORECASE)
_READING = (
    duckdb.StatementType.SELECT,
    duckdb.StatementType.EXPLAIN,
    duckdb.StatementType.SET,
    duckdb.StatementType.CREATE,  # only temporary things, in memory: the catalog is read-only
)


def list_reports() -> int:
    """Print every report with its question and variables; always 0."""
    for name, question in reports().items():
        print(f"{name}  {' '.join(f'{variable}=' for variable in question.variables)}".rstrip())
        print(f"  {question.title}")
    return 0


def run(question: Question, values: dict[str, Value], format: str) -> int:
    """Run SQL on the catalog, read-only and with times in UTC, and print the rows of its last statement; always 0.

    It reads the catalog and the lake's tables, and writes nothing: other files, extensions and settings are refused.

    Raises:
        QueryError: DuckDB refuses the query, or a statement does more than read.
        LakeError: there is no catalog.
    """
    with connect() as connection:
        if "experiment" in question.variables and isinstance(wanted := values.get("experiment"), str):
            known = [name for (name,) in connection.execute("SELECT DISTINCT key FROM versions").fetchall()]
            if wanted not in known:
                listed = near(wanted, known) or " `etpi status` lists the experiments."
                raise QueryError(f"{question.name}: the lake has no data of {wanted!r}.{listed}")
        try:
            for name, value in values.items():
                connection.execute(f"SET VARIABLE {name} = $value", {"value": value})
            connection.execute(_confinement(connection) + "SET lock_configuration = true")
            _refuse_writing(connection, question)
            connection.execute(question.text)
            names = [column[0] for column in connection.description or ()]
            rows = connection.fetchall() if names else []
        except duckdb.Error as error:
            raise QueryError(f"{question.name}: {error}") from error
    if format == "table":
        print(output.table(names, rows, columns.width() if sys.stdout.isatty() else None))
    else:
        print(output.FORMATS[format](names, rows))
    return 0


def _confinement(connection: duckdb.DuckDBPyConnection) -> str:
    """Return settings under which DuckDB opens no file but those below the folder of the views' tables."""
    views = connection.execute("SELECT sql FROM duckdb_views() WHERE NOT internal").fetchall()
    files = [file.replace("''", "'") for (sql,) in views for file in _FILE.findall(sql)]
    folder = os.path.commonpath(map(os.path.dirname, files)) if files else None
    listed = "[]" if folder is None else f"['{folder.replace(chr(39), chr(39) * 2)}']"
    return f"SET allowed_directories = {listed}; SET enable_external_access = false; "


def _refuse_writing(connection: duckdb.DuckDBPyConnection, question: Question) -> None:
    for statement in connection.extract_statements(question.text):
        reads = statement.type in _READING
        if statement.type == duckdb.StatementType.EXPLAIN:  # EXPLAIN ANALYZE runs its statement
            explain = _EXPLAIN.match(statement.query)
            inner = connection.extract_statements(statement.query[explain.end() :]) if explain else []
            reads = [explained.type for explained in inner] == [duckdb.StatementType.SELECT]
        if not reads:
            raise QueryError(
                f"{question.name}: `etpi sql` only reads, and {statement.type.name} does more. Print a result with "
                "--format csv or json; for other statements open the catalog with your own DuckDB"
            )


def shell() -> int:
    """Replace this process by DuckDB's shell on the catalog, read-only, with times in UTC and in its safe mode.

    Raises:
        LakeError: there is no catalog.
        QueryError: DuckDB's shell is not installed.
    """
    path = default_path()
    with connect(path) as connection:  # its error names the missing file
        settings = f"SET TimeZone = 'UTC'; {_confinement(connection)}"
    program = find_shell()
    if sys.stdin.isatty():
        print(f"{path}, read-only, times in UTC. SHOW TABLES; DESCRIBE turns; .quit", file=sys.stderr)
    os.execv(program, [program, "-readonly", str(path), "-cmd", settings, "-cmd", ".safe_mode"])


def find_shell() -> str:
    """Return the path of DuckDB's shell: of this environment, else of PATH.

    Raises:
        QueryError: there is none.
    """
    beside = Path(sys.executable).with_name(SHELL)
    program = str(beside) if os.access(beside, os.X_OK) else shutil.which(SHELL)
    if program is None:
        raise QueryError(
            f"DuckDB's shell is not installed: there is no {beside}, and no {SHELL} on PATH. Install it with "
            "`pip install duckdb-cli`, or give a query: etpi sql -c 'SELECT ...', etpi sql REPORT"
        )
    return program


Value = str | int | float | bool

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")


def find(name: str) -> Question:
    """Return a report by its name, or a file of SQL.

    Raises:
        QueryError: there is neither; the message has the nearest reports.
    """
    known = reports()
    if name in known:
        return known[name]
    path = Path(name).expanduser()
    if path.is_file():
        try:
            return Question(name, read_text(path))
        except (OSError, ValueError) as error:
            raise QueryError(f"no SQL: {error}") from error
    raise QueryError(f"there is no file and no report {name!r}.{near(name, known)} `etpi sql --list` shows the reports")


def parse_values(pairs: tuple[str, ...], question: Question) -> dict[str, Value]:
    """Return name -> value of arguments `name=value`.

    A number or true or false is one; quotes force a text: rollout="'7'".

    Raises:
        QueryError: an argument has another form, or the question does not read the variable.
    """
    values: dict[str, Value] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise QueryError(f"{pair!r} is not of the form name=value")
        if name not in question.variables:
            reads = f"reads {', '.join(question.variables)}" if question.variables else "reads no variable"
            raise QueryError(f"{question.name} has no variable {name!r}; it {reads}")
        values[name] = _value(text)
    return values


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    if match := _NUMBER.fullmatch(text):
        return float(text) if match[2] else int(text)
    quoted = len(text) > 1 and text[0] == text[-1] == "'"
    return text[1:-1] if quoted else text
