"""Answers of OpenAI's Batch API joined with the requests beside them; `formats/openai_batch.toml` reads such a pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from itertools import islice
from pathlib import Path
from typing import Any

from etpi_assets.importers.format import FIRST_ROWS
from etpi_assets.importers.sessions import jsonl_units
from etpi_assets.importers.source import field, text_field
from etpi_resources import rows
from etpi_resources.inside import open_file
from etpi_resources.rows import Row
from etpi_resources.rows.bounded import Unreadable, attempt, parse_json

count_rows = rows.count_rows


def claims(row: Row) -> bool:
    return "custom_id" in row and (_is_answer(row) or {"method", "url", "body"} <= set(row))


def _is_answer(row: Any) -> bool:
    return isinstance(row, Mapping) and "custom_id" in row and "response" in row


def units(root: Path) -> list[Path]:
    """Return the files of answers; the root itself if it is a file."""
    return [file for file in jsonl_units(root) if file == root or _holds_answers(file)]


def _holds_answers(file: Path) -> bool:
    """Return whether the first readable row is an answer, or no row of a file with rows is readable."""
    read = [row for _, row in islice(rows.iter_rows(file), FIRST_ROWS)]
    readable = [row for row in read if not isinstance(row, Unreadable)]
    return _is_answer(readable[0]) if readable else any(row.reason != "empty_file" for row in read)


def iter_rows(unit: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, {"answer": the row, "request": its body, if one is known}) of each row, or an Unreadable."""
    places = _places(unit)
    for number, row in rows.iter_rows(unit):
        if isinstance(row, Unreadable):
            yield number, row
        else:
            request = field(row, "body") or _request(row, places)
            body = field(row, "response", "body")
            errored = field(row, "error", "message") or field(body, "error", "message") or not isinstance(body, dict)
            if isinstance(request, Unreadable) and not errored:
                yield number, request
            else:
                yield number, {"answer": row, **({"request": request} if isinstance(request, dict) else {})}


_Places = dict[str, list[tuple[Path, int]]]
"""`custom_id` -> (file, offset) of each request."""


def _request(row: Any, places: _Places) -> Any:
    """Return the body of an answer's request; an Unreadable if several have its id, None if none has."""
    name = text_field(row, "custom_id") or ""
    matching, bodies = places.get(name, ()), list[Any]()
    for path, offset in matching:
        with open_file(path) as file:
            file.seek(offset)
            body = field(parse_json(file.readline(), path.name), "body")
        if body not in bodies:
            bodies.append(body)
    if len(bodies) > 1:
        files = " and ".join(sorted({path.name for path, _ in matching}))
        remedy = "move the answers of each batch into a folder with their requests"
        return Unreadable("ambiguous_request", f"{files} have different requests {name!r}; {remedy}")
    return next(iter(bodies), None)


def _places(unit: Path) -> _Places:
    """Return the requests of the answers, from the files beside them; from one alone if only it has all of them.

    An id names a request within its batch only.
    """
    wanted = {name for _, row in rows.iter_rows(unit) if (name := text_field(row, "custom_id"))}
    files = [_places_in(path, wanted) for path in jsonl_units(unit.parent) if path != unit]
    whole = [places for places in files if places.keys() == wanted]
    merged: _Places = {}
    for places in whole if len(whole) == 1 else files:
        for name, of_name in places.items():
            merged.setdefault(name, []).extend(of_name)
    return merged


def _places_in(path: Path, wanted: Set[str]) -> _Places:
    places: _Places = {}
    with open_file(path) as file:
        offset = 0
        for line in file:
            if b'"custom_id"' in line and b'"body"' in line:
                row = attempt(parse_json, line, path.name)
                if (name := text_field(row, "custom_id") or "") in wanted and text_field(row, "url"):
                    places.setdefault(name, []).append((path, offset))
            offset += len(line)
    return places
