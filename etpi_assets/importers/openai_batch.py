"""Answers of OpenAI's Batch API, with the requests from the files beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from hashlib import sha256
from pathlib import Path
from typing import Any

from etpi_assets.importers import nemo_gym
from etpi_assets.importers.conversation import ChatEntry, Options, chat_entries
from etpi_assets.importers.format import FOLDERS, FormatDoc, Row, row_format
from etpi_assets.importers.messages import solo
from etpi_assets.importers.rows import count_rows, iter_rows
from etpi_assets.importers.run_info import run_info, sampler_of
from etpi_assets.importers.sessions import as_context, jsonl_units
from etpi_assets.importers.source import Unreadable, as_list, as_mapping, bytes_of, field, parse_json, text_field
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.inside import open_file


def claims(row: Row) -> bool:
    return "custom_id" in row and (_is_answer(row) or {"method", "url", "body"} <= set(row))


def _is_answer(row: Any) -> bool:
    return isinstance(row, Mapping) and "custom_id" in row and "response" in row


def units(root: Path) -> list[Path]:
    """Return the files of answers; the root itself if it is a file."""
    return [file for file in jsonl_units(root) if file == root or _may_hold_answers(file)]


def _may_hold_answers(file: Path) -> bool:
    """Return whether the first readable row is an answer, or no row of a file with rows is readable."""
    damaged = False
    for _, row in iter_rows(file):
        if not isinstance(row, Unreadable):
            return _is_answer(row)
        damaged |= row.reason != "empty"
    return damaged


def iter_answers(unit: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, {"answer": the row, "request": its body, or why it is unknown}) of each row, or an Unreadable."""
    places = _places(unit)
    for number, row in iter_rows(unit):
        if isinstance(row, Unreadable):
            yield number, row
        else:
            yield number, {"answer": row, "request": field(row, "body") or _request(row, places)}


_Places = dict[str, dict[bytes, tuple[Path, int]]]
"""`custom_id` -> digest of each different body -> the first file and offset of it."""


def _request(row: Any, places: _Places) -> Any:
    """Return the body of an answer's request; an Unreadable if several have its id, None if none has."""
    name = text_field(row, "custom_id") or ""
    matching = list(places.get(name, {}).values())
    if len(matching) > 1:
        files = " and ".join(sorted({path.name for path, _ in matching}))
        remedy = "move the answers of each batch into a folder with their requests"
        return Unreadable("ambiguous_request", f"{files} have different requests {name!r}; {remedy}")
    for path, offset in matching:
        with open_file(path) as file:
            file.seek(offset)
            return field(parse_json(file.readline(), path.name), "body")
    return None


def _places(unit: Path) -> _Places:
    """Return the requests of the answers, from the files beside them; from one alone if only it has all of them.

    An id names a request within its batch only.
    """
    wanted = {name for _, row in iter_rows(unit) if (name := text_field(row, "custom_id"))}
    files = [_places_in(path, wanted) for path in jsonl_units(unit.parent) if path != unit]
    whole = [places for places in files if places.keys() == wanted]
    merged: _Places = {}
    for places in whole if len(whole) == 1 else files:
        for name, bodies in places.items():
            merged[name] = {**bodies, **merged.get(name, {})}
    return merged


def _places_in(path: Path, wanted: Set[str]) -> _Places:
    places: _Places = {}
    with open_file(path) as file:
        offset = 0
        for line in file:
            if b'"custom_id"' in line and b'"body"' in line:
                try:
                    row = parse_json(line, path.name)
                except Unreadable:
                    row = None
                if (name := text_field(row, "custom_id") or "") in wanted and text_field(row, "url"):
                    digest = sha256(bytes_of(field(row, "body"))).digest()
                    places.setdefault(name, {}).setdefault(digest, (path, offset))
            offset += len(line)
    return places


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read an answer. Raises Unreadable: `errored`, `no_prompt`, `ambiguous_request`, or as `chat_entries`."""
    answer, request = as_mapping(row["answer"], where), row["request"]
    body = field(answer, "response", "body")
    error = text_field(answer, "error", "message") or text_field(body, "error", "message")
    if error or not isinstance(body, dict):
        raise Unreadable("errored", f"{where}: {error or 'no response'}"[:300])
    if isinstance(request, Unreadable):
        raise Unreadable(request.reason, f"{where}: {request.detail}")
    if not isinstance(request, dict):
        raise Unreadable("no_prompt", f"{where}: no file beside it has the request {answer.get('custom_id')!r}")
    if "output" in body:
        gym = {"responses_create_params": request, "response": body, "instance_id": answer.get("custom_id")}
        return nemo_gym.record(gym, where, options)
    choice = as_mapping(next(iter(as_list(body.get("choices"), f"{where}, choices")), None), f"{where}, choices[0]")
    context = chat_entries(as_list(request.get("messages"), f"{where}, messages"), f"{where}, messages")
    message = {**as_mapping(choice.get("message"), f"{where}, message"), "finish_reason": choice.get("finish_reason")}
    entries: list[ChatEntry] = [*as_context(context), *chat_entries([message], f"{where}, message")]
    facts = {"instance_id": answer.get("custom_id"), "model": body.get("model"), "tools": request.get("tools")}
    rollout = solo(entries, run_info(facts, options), where, options)
    rollout.sampler = sampler_of(request, body.get("usage"))
    return rollout


FORMAT = row_format(
    "openai_batch",
    FormatDoc(
        title="Answers of OpenAI's Batch API, of chat completions and of the Responses API",
        files="`.jsonl`: the answers, and beside them the plain file of the requests; one rollout per answer",
        keeps="the request's messages as context, the first choice, calls, tool schemas, finish reason, model, "
        "sampler, usage; `custom_id` is the task",
        loses="further choices; quarantined are errors, and answers whose request is not beside them or is one of "
        "several with its `custom_id`, which is unique in one batch only: give each batch a folder",
    ),
    claims=claims,
    record=record,
    iter_rows=iter_answers,
    count_rows=count_rows,
    rank=FOLDERS,
    units=units,
)
