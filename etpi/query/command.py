"""The work of `etpi sql`: run a question on the catalog and print its result, list the reports, or open the shell."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import duckdb

from etpi.query import output
from etpi.query.questions import QueryError, Value
from etpi.run import columns
from etpi_resources.lake.catalog import connect, default_path
from etpi_resources.lake.questions import Question, reports

SHELL = "duckdb"


def list_reports() -> int:
    """Print every report with its question and variables; always 0."""
    for name, question in reports().items():
        print(f"{name}  {' '.join(f'{variable}=' for variable in question.variables)}".rstrip())
        print(f"  {question.title}")
    return 0


def run(question: Question, values: dict[str, Value], format: str) -> int:
    """Run SQL on the catalog, read-only and with times in UTC, and print the rows of its last statement; always 0.

    Raises:
        QueryError: DuckDB refuses the query.
        LakeError: there is no catalog.
    """
    with connect() as connection:
        try:
            for name, value in values.items():
                connection.execute(f"SET VARIABLE {name} = $value", {"value": value})
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


def shell() -> int:
    """Replace this process by DuckDB's shell on the catalog, read-only and with times in UTC.

    Raises:
        LakeError: there is no catalog.
        QueryError: DuckDB's shell is not installed.
    """
    path = default_path()
    connect(path).close()  # its error names the missing file
    program = find_shell()
    if sys.stdin.isatty():
        print(f"{path}, read-only, times in UTC. SHOW TABLES; DESCRIBE turns; .quit", file=sys.stderr)
    os.execv(program, [program, "-readonly", str(path), "-cmd", "SET TimeZone = 'UTC'"])


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
