"""Import many recorded runs in bounded memory: read parts in worker processes, spill them as Arrow, stream the tables.

Rows and their order do not depend on how the files are divided into parts or on the number of workers.
"""

from __future__ import annotations

import gc
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from etpi_assets.importers import importer_named, plan, read_options, results
from etpi_assets.importers.account import Account, findings
from etpi_assets.importers.format import ImportResult, unconvertible
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories import rollout_checks
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import TABLES, captured_digest, to_rows
from etpi_resources.lake.parquet import storage_schema
from etpi_resources.lake.schemas import from_tuples
from etpi_resources.process.pool import ordered_map, workers_for
from etpi_resources.process.progress import Progress

_PART_UNITS = 24
_PART_BYTES = 8 << 20
"""Upper bounds of a part: units, and bytes of units that are files. A larger file is a part of its own."""
_SECONDS_PER_UNIT, _SECONDS_PER_BYTE = 0.02, 1e-7
"""Estimated seconds of one core to read a unit that is a folder, or a byte of one that is a file."""
_CHUNK_TURNS, _CHUNK_CHARACTERS = 1024, 32 << 20
"""Turns and refusals, and characters of messages (which turns repeat), after which rows are written."""
_NAMES = (*TABLES, "quarantined")


@dataclass(frozen=True)
class ImportSource:
    """The import of a rollout set, as a worker receives it. `root`: the path; `suite`: as in the spec."""

    format: str
    root: str
    options: Mapping[str, Any]
    rollout_set: str
    suite: str | None


@dataclass(frozen=True)
class BulkImport:
    """The imported tables as streams of record batches, each to be read once.

    Attributes:
        figures: counts of all parts for the checks and the asset's page, see `_read_part`.
        total: rollouts and refusals, as `count_found` counts them.
    """

    tables: Mapping[str, Iterator[pa.RecordBatch]]
    figures: Mapping[str, Any]
    total: int


def import_in_bulk(
    source: ImportSource,
    spill: Path,
    *,
    hashes: Mapping[str, str],
    workers: int | None = None,
    label: str = "import",
    log: Callable[[str], None] = lambda line: None,
) -> BulkImport:
    """Import everything below the source's root.

    Args:
        spill: folder for intermediate files, emptied first; each file is deleted once its table has been read.
        hashes: task id -> content hash, if the suite is known.
        workers: processes that read, 1 for this one alone; None: `workers_for` the size of the input.
        label: the asset and its partition, in lines of the log.

    Raises:
        FileNotFoundError, ValueError: as `import_runs` does; or a column or key that no format reads stops the import.
        WorkerDied, WorkersDied: as `ordered_map`; the message names the worker's files.
    """
    chosen, root = plan(source.format, Path(source.root)), Path(source.root)
    read_options(source.options)
    shutil.rmtree(spill, ignore_errors=True)
    spill.mkdir(parents=True)
    parts = [part for name, units in chosen.inputs for part in _parts(name, units)]
    if not parts:
        names = " and ".join(chosen.formats)
        raise FileNotFoundError(f"{source.root} has no files of the format {names}; name another path or format")
    units, size = sum(len(part.units) for part in parts), sum(part.size for part in parts)
    if workers is None:
        workers = workers_for(units * _SECONDS_PER_UNIT + size * _SECONDS_PER_BYTE)
    figures, progress = [_write_unread(chosen.unread, len(parts), spill)], Progress(label, "read", units, log)
    blocks = ((f"{part.units[0]} and {len(part.units) - 1} more", (n, part)) for n, part in enumerate(parts))
    factory, workers = partial(_part_reader, source, spill), min(workers, len(parts))
    for part, read in zip(
        parts, ordered_map(factory, blocks, workers=workers, reads=[spill, root], log=log), strict=True
    ):
        figures.append(read)
        progress.advance(len(part.units))
    whole = rollout_checks.merged([*figures[1:], figures[0]])
    if stopping := [each for each in findings(whole.pop("unread")) if each.stops]:
        listed = ", ".join(f"{each.name} ({each.kind}, {each.count:,} times)" for each in stopping)
        names = ", ".join(f'"{each.name}"' for each in stopping)
        raise ValueError(
            f"{source.root} has columns or keys that no format reads and that may change what is trained: {listed}. "
            f"Name them in a format of your own, or leave them out with options.ignore = [{names}]"
        )
    tables = {name: _stream(name, spill, len(parts) + 1) for name in _NAMES}
    tables["rollouts"] = _with_task_columns(tables["rollouts"], hashes)
    return BulkImport(tables, whole, sum(f["found"] for f in figures))


class _Part(NamedTuple):
    """Units of a format that are read together, and their bytes as far as they are files."""

    format: str
    units: Sequence[Path]
    size: int


def _parts(format: str, units: Sequence[Path]) -> list[_Part]:
    """Divide the units of a format into parts, in order."""
    parts: list[_Part] = []
    for unit in units:
        size = unit.stat().st_size if unit.is_file() else 0
        if parts and len(parts[-1].units) < _PART_UNITS and parts[-1].size + size <= _PART_BYTES:
            parts[-1] = _Part(format, [*parts[-1].units, unit], parts[-1].size + size)
        else:
            parts.append(_Part(format, [unit], size))
    return parts


def _write_unread(unread: Sequence[RejectedInput], number: int, spill: Path) -> dict[str, Any]:
    """Spill the files that no format reads as a part of their own, and return its figures."""
    tables = _tables([_refusal_row(item) for item in unread])
    with _spilled(spill, number) as write:
        write(tables)
    return {"found": len(unread), "unread": {}, **rollout_checks.set_figures(tables, {}, live=False)}


def _read_part(source: ImportSource, part: _Part, number: int, spill: Path) -> dict[str, Any]:
    """Read units and spill their rows as part `number`.

    Returns:
        The part's figures (`rollout_checks.set_figures`), "found", and "unread" (`Account.figures`).
    """
    importer, root, account = importer_named(part.format), Path(source.root), Account()
    units, options = part.units, read_options(source.options, account)
    figures: list[dict[str, Any]] = [{"found": sum(importer.found(unit, root) for unit in units)}]
    with _spilled(spill, number) as write:
        inputs: list[_InputRows] = []

        def flush() -> None:
            tables = _tables(inputs)
            digests = {i.rollout_id: i.digest for i in inputs if i.rollout_id}
            read = {name: sum(getattr(i, name) for i in inputs) for name in ("messages", "calls")}
            figures.append(rollout_checks.set_figures(tables, digests, live=False, read=read))
            write(tables)
            inputs.clear()

        turns = characters = 0
        for unit in units:
            for item in results(importer, unit, root, options):
                rows = _input_rows(item, source)
                inputs.append(rows)
                turns += len(rows.tables.get("turns", ())) or 1  # refusals too take memory
                if isinstance(item, RolloutRecord):
                    characters += sum(len(message.content) for agent in item.agents for message in agent.messages)
                if turns >= _CHUNK_TURNS or characters > _CHUNK_CHARACTERS:
                    flush()
                    turns = characters = 0
        flush()
    return rollout_checks.merged([*figures, {"unread": account.figures()}])


class _InputRows(NamedTuple):
    """The rows of one rollout or refusal by table, the digest of its ids, and its numbers of messages and calls."""

    source: str
    tables: Mapping[str, Sequence[tuple[Any, ...]]]
    rollout_id: str = ""
    digest: str = ""
    messages: int = 0
    calls: int = 0


def _input_rows(item: ImportResult, source: ImportSource) -> _InputRows:
    """Return the rows of a rollout or of a refusal; a rollout that cannot be converted is refused."""
    if isinstance(item, RejectedInput):
        return _refusal_row(item)
    name = item.source or ""
    try:
        item.rollout_set, item.suite = source.rollout_set, source.suite
        messages = [message for agent in item.agents for message in agent.messages]
        calls = sum([len(message.tool_calls) for message in messages if message.tool_calls])
        return _InputRows(name, to_rows(item), item.rollout_id, captured_digest(item), len(messages), calls)
    except Exception as error:
        return _refusal_row(unconvertible(name, error))


def _refusal_row(item: RejectedInput) -> _InputRows:
    name, detail = (text.encode("utf-8", "backslashreplace").decode() for text in (item.source, item.detail))
    return _InputRows(name, {"quarantined": [("raw_rollouts", name, item.row, item.reason, detail)]})


def _tables(inputs: list[_InputRows]) -> dict[str, pa.Table]:
    """Return the tables of all inputs; one with a value that its column cannot hold is quarantined instead."""

    def tables(chosen: Sequence[_InputRows]) -> dict[str, pa.Table]:
        return {name: from_tuples(name, [row for i in chosen for row in i.tables.get(name, ())]) for name in _NAMES}

    try:
        return tables(inputs)
    except Exception:  # Arrow's, and those of values that a column does not hold
        for number, rows in enumerate(inputs):
            try:
                tables([rows])
            except Exception as error:
                inputs[number] = _refusal_row(unconvertible(rows.source, error))
        return tables(inputs)


def _part_reader(source: ImportSource, spill: Path) -> Callable[[tuple[int, _Part]], dict[str, Any]]:
    """Return the function that reads (number of the part, part)."""

    def read(numbered: tuple[int, _Part]) -> dict[str, Any]:
        collecting = gc.isenabled()
        gc.disable()  # records have no reference cycles, and collection takes a fifth of the time
        try:
            return _read_part(source, numbered[1], numbered[0], spill)
        finally:
            if collecting:
                gc.enable()

    return read


@contextmanager
def _spilled(folder: Path, number: int) -> Iterator[Callable[[Mapping[str, pa.Table]], None]]:
    """Yield the function that appends rows to the Arrow files of one part, one per table.

    They get their names when all rows are written: a node that was cut off may still write a part that is read again.
    """
    paths = {name: _file(folder, name, number) for name in _NAMES}
    beside = {name: path.with_suffix(f".{uuid.uuid4().hex}") for name, path in paths.items()}
    with ExitStack() as files:
        opened = {name: files.enter_context(pa.OSFile(str(path), "wb")) for name, path in beside.items()}
        writers = {n: files.enter_context(pa.ipc.new_stream(file, storage_schema(n))) for n, file in opened.items()}

        def write(tables: Mapping[str, pa.Table]) -> None:
            for name, table in tables.items():
                writers[name].write_table(pa.Table.from_arrays(table.columns, schema=storage_schema(name)))

        yield write
    for name, path in beside.items():
        path.rename(paths[name])


def _file(folder: Path, table: str, number: int) -> Path:
    return folder / f"{number:06d}.{table}.arrow"


def _stream(table: str, folder: Path, parts: int) -> Iterator[pa.RecordBatch]:
    """Yield a table's batches in the order of the parts; delete the file of each part once it has been read."""
    for number in range(parts):
        path = _file(folder, table, number)
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as reader:
            yield from reader
        path.unlink()


def _with_task_columns(batches: Iterator[pa.RecordBatch], hashes: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """Set the columns that need the whole set: `sample`, which numbers the rollouts of a task, and `task_hash`."""
    samples: Counter[str | None] = Counter()
    for batch in batches:
        columns: dict[str, list[Any]] = {"sample": [], "task_hash": []}
        for task_id in batch.column("task_id").to_pylist():
            columns["sample"].append(samples[task_id])
            columns["task_hash"].append(hashes.get(task_id or ""))  # None for tasks that the suite lacks
            samples[task_id] += 1
        for name, values in columns.items():
            at = batch.schema.get_field_index(name)
            batch = batch.set_column(at, name, pa.array(values, batch.schema.field(at).type))
        yield batch
