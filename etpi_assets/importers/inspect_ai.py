"""Logs of Inspect: `.eval` archives and `.json` files, a rollout for each sample."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from etpi_assets.importers.calls import read_tools
from etpi_assets.importers.conversation import Options
from etpi_assets.importers.format import Row
from etpi_assets.importers.generic import read_run
from etpi_assets.importers.run_info import reward_of
from etpi_assets.importers.source import as_list, as_mapping, field, list_field, no_run, text_field
from etpi_assets.importers.spec import at, load
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.inside import open_file
from etpi_resources.rows.bounded import (
    MOST_ROW_BYTES,
    Unreadable,
    attempt,
    check_ratio,
    parse_json,
    read_errors,
    read_json,
    too_large,
)

_ARCHIVE = ".eval"
_SAMPLES = "samples/"
_HEAD = "header.json"
_STARTED = "_journal/start.json"
_ZSTD = 93
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_ATTACHED = "attachment://"


def iter_rows(unit: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, {"log": the head, "sample": ...}) of each sample, or an Unreadable. Raises Unreadable."""
    if unit.suffix == _ARCHIVE:
        yield from _archived(unit)
        return
    log = as_mapping(read_json(unit), unit.name)
    if not load("inspect")[0].claims(log):
        raise no_run(log, f"{unit.name} is no log of Inspect")
    head = {key: value for key, value in log.items() if key not in ("samples", "reductions")}
    samples = as_list(log.get("samples") or [], f"{unit.name}.samples")
    if not samples:
        raise _empty(unit, head)
    yield from ((number, {"log": head, "sample": sample}) for number, sample in enumerate(samples))


def count_rows(unit: Path) -> int:
    """Count the values of `iter_rows`; a unit that cannot be read is one."""
    try:
        if unit.suffix != _ARCHIVE:
            return sum(1 for _ in iter_rows(unit))
        with _opened(unit) as archive:
            return len(_names(archive)) or 1
    except Unreadable:
        return 1


def _archived(unit: Path) -> Iterator[tuple[int, Any]]:
    with _opened(unit) as archive:
        names = _names(archive)
        start = next((name for name in (_HEAD, _STARTED) if name in archive.NameToInfo), None)
        head: Any = attempt(_entry, archive, start, unit) if start else {}
        if not names:
            raise _empty(unit, head)
        for number, name in enumerate(names):
            sample = head if isinstance(head, Unreadable) else attempt(_entry, archive, name, unit)
            yield number, sample if isinstance(sample, Unreadable) else {"log": head, "sample": sample}


def _empty(unit: Path, head: Any) -> Unreadable:
    why = text_field(head, "error", "message") or text_field(head, "status") or "no status"
    return Unreadable("empty", f"{unit.name} has no samples: {why[:300]}")


def _opened(unit: Path) -> zipfile.ZipFile:
    """Open an archive. Raises Unreadable: `bad_zip`, `unreadable`."""
    with read_errors(unit):
        file = open_file(unit)
        try:
            return zipfile.ZipFile(file)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, UnicodeDecodeError) as error:
            file.close()
            raise Unreadable("bad_zip", f"{unit.name}: {error}; the file is cut or damaged") from error


def _names(archive: zipfile.ZipFile) -> list[str]:
    """Return the samples' entries: those at the top, and the shells of samples in chunks, which are refused."""
    names = [name for name in archive.NameToInfo if name.startswith(_SAMPLES) and name.endswith(".json")]
    return sorted(name for name in names if name.count("/") == 1 or name.endswith("/sample.json"))


def _entry(archive: zipfile.ZipFile, name: str, unit: Path) -> Mapping[str, Any]:
    """Return an entry's object. Raises Unreadable: `bad_zip`, `decompression_bomb`, `too_large`, or as `parse_json`."""
    info = archive.NameToInfo[name]
    if name.count("/") > 1:
        raise Unreadable(
            "unknown_form", f"{unit.name}, {name}: the sample is in chunks; convert it with `inspect log convert`"
        )
    try:
        with _stream(archive, info) as stream:
            data = stream.read(MOST_ROW_BYTES + 1)
    except Exception as error:  # those of zipfile, zlib and lzma have no common base
        raise Unreadable("bad_zip", f"{unit.name}, {name}: {error}; the file is cut or damaged") from error
    check_ratio(len(data), unit)
    if len(data) > MOST_ROW_BYTES:
        raise too_large(f"{unit.name}, {name}")
    return as_mapping(parse_json(data, f"{unit.name}, {name}"), name)


def _stream(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    """Open an entry; zstd, which newer logs use, is unknown to the standard library before Python 3.14."""
    if info.compress_type != _ZSTD:
        return archive.open(info)
    import pyarrow as pa

    file: Any = archive.fp
    file.seek(info.header_offset)
    start = file.read(30)
    file.seek(int.from_bytes(start[26:28], "little") + int.from_bytes(start[28:30], "little"), 1)
    return pa.CompressedInputStream(io.BytesIO(file.read(min(info.compress_size, MOST_ROW_BYTES))), "zstd")


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read a sample. Raises Unreadable: as `read_run`."""
    log, sample = row["log"], as_mapping(row["sample"], where)
    messages = [_message(raw, f"{where}, messages[{i}]") for i, raw in enumerate(as_list(_messages(sample), where))]
    held = sample.get("scores")
    stated = {key: field(s, "value") for key, s in held.items()} if isinstance(held, dict) else {}
    # Letters and words are numbers, as Inspect reads them.
    graded = {k: reward_of("score", _GRADES.get(v.strip(), v) if isinstance(v, str) else v) for k, v in stated.items()}
    scores = {key: value for key, value in graded.items() if value is not None}
    stop, ended = at(sample, ("output", "choices", -1, "stop_reason")), "length"
    if text_field(sample, "error", "message"):
        ended = "Error"
    elif text_field(sample, "limit", "type"):
        ended = "LimitsExceeded"
    facts = {"exit": ended if ended != "length" or stop == "max_tokens" else None, "tools": _offered(sample)}
    sample = {**sample, **facts, "messages": messages, "reward": next(iter(scores.values()), None)}
    rollout = read_run({"log": log, "sample": sample}, load("inspect")[0], where, options)
    if rollout.outcome and len(scores) > 1:
        rollout.outcome["scores"] = scores
    return rollout


def _message(raw: Any, name: str) -> dict[str, Any]:
    """Return a message as chat APIs have it, with the errors of tools and without encrypted reasoning."""
    message: dict[str, Any] = {"role": None, **as_mapping(raw, name)}
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [part for p in content if (part := _readable(p, name)) is not None]
    if message["role"] == "tool" and not content:
        message["content"] = text_field(message, "error", "message") or content
    if message["role"] == "assistant" and message.get("source") == "input":
        message["train"] = False
    return message


def _readable(part: Any, name: str) -> Any:
    """Return a part of a message; of encrypted reasoning its summary, None if it has none.

    Raises Unreadable: `unknown_form` for a call that the provider ran within the response.
    """
    if field(part, "type") == "tool_use":
        raise Unreadable("unknown_form", f"{name} has a call whose result the provider added to the same response")
    if not isinstance(part, dict) or part.get("type") != "reasoning" or part.get("redacted") is not True:
        return part
    return {"type": "reasoning", "reasoning": part["summary"]} if part.get("summary") else None


def _messages(sample: Mapping[str, Any]) -> Any:
    """Return the messages with their attachments put in."""
    attachments: Any = sample.get("attachments")

    def resolved(value: Any) -> Any:
        if isinstance(value, str) and value.startswith(_ATTACHED):
            return attachments.get(value.removeprefix(_ATTACHED), value)
        if isinstance(value, dict):
            return {key: resolved(inner) for key, inner in value.items()}
        return [resolved(inner) for inner in value] if isinstance(value, list) else value

    messages = sample.get("messages")
    return resolved(messages) if isinstance(attachments, dict) and attachments else messages


def _offered(sample: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the schemas of the first request that has some."""
    for event in list_field(sample, "events"):
        if field(event, "event") == "model" and (schemas := read_tools(field(event, "tools"), "tools")):
            return schemas
    return None
