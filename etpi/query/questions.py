"""The queries of `etpi sql`: a report by name, a file, or text, with the values of the variables it reads."""

from __future__ import annotations

import re
from pathlib import Path

from etpi_assets.specs.plugins import near
from etpi_resources.inside import read_text
from etpi_resources.lake.lake import LakeError
from etpi_resources.lake.questions import Question, reports

Value = str | int | float | bool

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")


class QueryError(LakeError):
    """A query cannot be found or run; the message names it and what to do."""


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
