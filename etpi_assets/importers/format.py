"""The description of an importable format, used by the registry, by detection and by docs/reference/formats.md.

`run_format` makes one with a rollout per file or folder, `row_format` one with a rollout per row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from etpi_assets.importers.conversation import Options
from etpi_assets.importers.source import (
    as_mapping,
    bytes_of,
    content_hash,
    content_hash_of,
    holds_conversation,
    without_padding,
)
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources import rows
from etpi_resources.inside import leads_inside
from etpi_resources.rows import Row
from etpi_resources.rows.bounded import Unreadable

ImportResult = RolloutRecord | RejectedInput
_BESIDE = frozenset(
    ("config.json", "dataset_info.json", "dataset_infos.json", "info.json", "metadata.json", "metrics.json")
    + ("preds.json", "results.json", "state.json", "summary.json")
)
"""Names of files that programs write beside rows."""
_FIRST_FILES = 8
FOLDERS, ROWS, PLAIN = 0, 1, 2
"""Ranks: files and folders of one program; documents and rows of a known form; rows that hold only messages."""


class DetectionInput:
    """The folder or file whose format is detected; its listing and its first rows are read once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def files(self) -> list[Path]:
        return rows.files_below(self.root)

    @cached_property
    def values(self) -> list[Any]:
        """The first values of the first eight files that hold rows: rows, or Unreadable."""
        files = rows.row_files(self.files)[:_FIRST_FILES]
        return [value for path in files for _, value in islice(rows.iter_rows(path), FIRST_ROWS)]

    @cached_property
    def rows(self) -> list[Row]:
        """The readable ones; those that may be runs come first, because programs write files beside their rows."""
        readable = [row for row in map(as_row, self.values) if isinstance(row, Mapping) and not is_manifest(row)]
        return sorted(readable, key=lambda row: not holds_conversation(row))


def as_row(value: Any) -> Any:
    """Return a value of a file as a row: an array of messages is a row of `messages`."""
    is_run = isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value)
    return {"messages": value} if is_run and holds_conversation(value) else value


@dataclass(frozen=True)
class FormatDoc:
    """The section of a format in docs/reference/formats.md: title, files, imported data and lost data."""

    title: str
    keeps: str
    loses: str
    files: str = ""


@dataclass(frozen=True)
class Format:
    """One importable format.

    Attributes:
        rank: of several formats that claim a folder, the one of the lowest rank is detected.
        claims: whether a folder or file holds the format.
        units: the inputs below a root, sorted: run folders or files.
        count: the number of rollouts and refusals of a unit, without parsing them; None: each unit is one.
        read: (unit, root, options) -> the rollouts and refusals of a unit.
        names: endings of files that are the format's whatever they hold; asked before any `claims`.
        of_folders: a unit is a folder.
        of_row: (row, its number, unit, source, options) -> its rollout or refusal; None if a rollout is not one row.
        iter_rows: yields the numbered rows of a unit.
    """

    name: str
    doc: FormatDoc
    rank: int
    claims: Callable[[DetectionInput], bool]
    units: Callable[[Path], list[Path]]
    count: Callable[[Path], int] | None
    read: Callable[[Path, Path, Options], Iterator[ImportResult]]
    names: tuple[str, ...] = ()
    of_folders: bool = False
    of_row: Callable[[Any, int, Path, str, Options], ImportResult] | None = None
    iter_rows: Callable[[Path], Iterator[tuple[int, Any]]] = rows.iter_rows

    def results(self, unit: Path, root: Path, options: Options) -> Iterator[ImportResult]:
        """Yield what `read` does, or the refusal of a unit that is, or has, a link out of the root."""
        if link := _link_out(unit, root):
            detail = f"{link} leads out of the import's folder; copy it there, or name its own folder in `path`"
            yield RejectedInput(source_of(unit, root), "link_outside", detail)
        else:
            yield from self.read(unit, root, options)

    def found(self, unit: Path, root: Path) -> int:
        """Return the number of `results`, without parsing them."""
        return 1 if self.count is None or _link_out(unit, root) else self.count(unit)


def _link_out(unit: Path, root: Path) -> Path | None:
    """Return a file of the unit that is outside the root when links are followed."""
    inside = root if root.is_dir() else root.parent
    links = [unit, *(path for path in unit.rglob("*") if path.is_symlink())] if unit.is_dir() else [unit]
    # A root that is itself a link was named by the user.
    return next((path for path in links if path != root and not leads_inside(path, inside)), None)


def run_format(
    name: str,
    doc: FormatDoc,
    *,
    claims: Callable[[DetectionInput], bool],
    units: Callable[[Path], list[Path]],
    record: Callable[[Path, Path, Options], RolloutRecord],
    rank: int = FOLDERS,
    names: tuple[str, ...] = (),
    of_folders: bool = False,
) -> Format:
    """Describe a format with one rollout per file or folder.

    `record(unit, root, options)` returns the rollout, or raises Unreadable; any other error refuses its input alone. A
    rollout without an id gets the hash of its file.
    """

    def read(unit: Path, root: Path, options: Options) -> Iterator[ImportResult]:
        source = source_of(unit, root)
        item = _result(lambda: record(unit, root, options), source)
        if isinstance(item, RolloutRecord):
            item.rollout_id = item.rollout_id or content_hash(source, [unit])
        yield item

    return Format(name, doc, rank, claims, units, None, read, names, of_folders)


def row_format(
    name: str,
    doc: FormatDoc,
    *,
    claims: Callable[[Row], bool],
    record: Callable[[Any, str, Options], RolloutRecord],
    group: Callable[[Row], Any] | None = None,
    rank: int = ROWS,
    names: tuple[str, ...] = (),
    part: Part | None = None,
    units: Callable[[Path], list[Path]] = rows.units,
    iter_rows: Callable[[Path], Iterator[tuple[int, Any]]] = rows.iter_rows,
    count_rows: Callable[[Path], int] | None = rows.count_rows,
) -> Format:
    """Describe a format with one rollout per row of JSON lines, a JSON array or parquet.

    Args:
        claims: whether a row has this format.
        record: (row, name for errors, options) -> the rollout; raises Unreadable; any other error refuses the row. With
            a `group` it gets a list of rows.
        group: consecutive rows with the same value of `group(row)` are one rollout; None: every row is one.
        part: a file of such items is one row.
        units, iter_rows, count_rows: list the units, read and count the rows of one, as those of `rows` do; `iter_rows`
            may raise Unreadable for a whole unit. None: rows are counted by reading them.
    """
    if part is not None:
        iter_rows, count_rows = partial(iter_runs, part=part), partial(count_runs, part=part)

    def numbered_rows(unit: Path) -> Iterator[tuple[int, Any]]:
        try:
            yield from iter_rows(unit)
        except Unreadable as refused:
            yield 0, refused

    def count(unit: Path) -> int:
        if group is None and count_rows is not None:
            return count_rows(unit)
        return sum(1 for _ in _grouped(numbered_rows(unit), group))

    def result(read: list[Any], number: int, unit: Path, source: str, options: Options) -> ImportResult:
        where = f"{source}, row {number}"
        beside = unit.name in _BESIDE and units is rows.units and options.map is None

        def rollout() -> RolloutRecord:
            values = [_checked_row(value, where, beside=beside) for value in read]
            # Only the hash covers the null padding of columnar storage.
            plain = [without_padding(value) for value in values] if rows.is_table(unit) else values
            created = record(plain[0] if group is None else plain, where, options)
            created.rollout_id = content_hash_of(f"{source}#{number}", [bytes_of(value) for value in values])
            return created

        return _result(rollout, source, number)

    def read(unit: Path, root: Path, options: Options) -> Iterator[ImportResult]:
        source, prompts = source_of(unit, root), dict[str, bytes]()
        for number, values in _grouped(numbered_rows(unit), group):
            item = result(values, number, unit, source, options)
            if isinstance(item, RolloutRecord):
                _separate(item, source, number, prompts)
            yield item

    per = "one rollout per row" if group is None else "one rollout per run of rows"
    files = doc.files or f"`.jsonl`, `.json`, `.parquet`, `.arrow`; text also with `.gz` or `.zst`; {per}"
    of_row = None if group is not None else (lambda row, *rest: result([row], *rest))
    doc, claimed = replace(doc, files=files), rows_claim(claims)
    return Format(name, doc, rank, claimed, units, count, read, names, False, of_row, numbered_rows)


def rows_claim(claims: Callable[[Row], bool], suffixes: tuple[str, ...] = ("",)) -> Callable[[DetectionInput], bool]:
    """Return the claim of a format by the first rows of a file whose name has one of the suffixes."""

    def claims_file(source: DetectionInput) -> bool:
        return any(file.name.endswith(suffixes) for file in source.files) and any(map(claims, source.rows))

    return claims_file


def _result(read: Callable[[], RolloutRecord], source: str, row: int | None = None) -> ImportResult:
    """Return the rollout that a function reads, or the refusal of its input."""
    try:
        rollout = read()
    except Unreadable as refused:
        return RejectedInput(source, refused.reason, refused.detail, row)
    except Exception as error:
        return unconvertible(source, error, row)
    rollout.source = source if row is None else f"{source}#{row}"
    return rollout


def _separate(rollout: RolloutRecord, source: str, row: int, prompts: dict[str, bytes]) -> None:
    """Give a numbered task (`RunInfo.numbered`) an id of its own if the file has the number for another prompt."""
    if not (task := rollout.task_id or "").startswith(f"{source}:"):
        return
    prompt = next((m.content for agent in rollout.agents for m in agent.messages if m.role == "user"), "")
    digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()[:16]
    if prompts.setdefault(task, digest) != digest:
        rollout.task_id = f"{task}#{row}"


def _checked_row(value: Any, where: str, *, beside: bool) -> Mapping[str, Any]:
    """Return a row. Raises Unreadable if it was not read, is no object, or describes the files that it is `beside`."""
    if isinstance(value := as_row(value), Unreadable):
        raise value
    row = as_mapping(value, where)
    if is_manifest(row):
        raise Unreadable("not_a_rollout", f"{where} describes the files beside it")
    if beside and not holds_conversation(row):
        raise Unreadable("not_a_rollout", f"{where} holds no messages, and the name is no run's")
    return row


def unconvertible(source: str, error: Exception, row: int | None = None) -> RejectedInput:
    """Return the refusal of an input that no reader expected: it never ends the import of the others."""
    return RejectedInput(source, "unconvertible", f"{type(error).__name__}: {str(error)[:500]}", row)


def source_of(unit: Path, root: Path) -> str:
    """Return the unit's path relative to the root; its name if it is the root."""
    return unit.relative_to(root).as_posix() if unit != root else unit.name


Part = tuple[Callable[[Any], bool], str]
"""(a test for items of a run, such as messages; the column that a row has for these items)."""
MANIFEST = "etpi_export"
"""Key that marks the manifest of an etpi export among the files of a data set."""


def is_manifest(value: Mapping[str, Any]) -> bool:
    """Return whether a value describes the files beside it: etpi's manifest, or the schema that `datasets` writes."""
    return MANIFEST in value or {"features", "citation"} <= value.keys()


def iter_runs(path: Path, part: Part) -> Iterator[tuple[int, Any]]:
    """Yield `iter_rows`; in a file of parts of runs, the parts of a run are one row, which has them in a column.

    A file has parts if one of its first rows is a part. Parts with the same id of a conversation (`_RUN_IDS`) are a
    run; those without one are one run together. Other rows of the file are yielded as they are.
    """
    numbered = rows.iter_rows(path)
    head = list(islice(numbered, FIRST_ROWS))
    numbered = chain(head, numbered)
    is_part, column = part
    if not any(is_part(row) for _, row in head):
        yield from numbered
        return
    runs: dict[Any, tuple[int, list[Any]]] = {}
    damaged: tuple[int, Any] | None = None
    for number, row in numbered:
        if isinstance(row, Unreadable):
            damaged = damaged or (number, row)
        elif is_part(row):
            run_id = next((str(row[key]) for key in _RUN_IDS if row.get(key) is not None), None)
            runs.setdefault(run_id, (number, []))[1].append(row)
        else:
            yield number, row
    if damaged and len(runs) == 1:  # the run lacks a part
        yield next(iter(runs.values()))[0], damaged[1]
        return
    for number, parts in runs.values():
        single = f"{path.name} holds one item of a run's `{column}`; write all of them into one array, in their order"
        yield number, {column: parts} if len(parts) > 1 else Unreadable("unknown_form", single)
    if damaged:
        yield damaged


FIRST_ROWS = 20
"""Rows at the beginning of a file that say what it holds: the first ones may be damaged, or a header."""
_RUN_IDS = ("conversation_id", "session_id", "dialogue_id", "thread_id", "chat_id", "trajectory_id", "episode_id",
            "run_id")  # fmt: skip
"""Keys of messages that name their conversation."""


def count_runs(path: Path, part: Part) -> int:
    """Count the values of `iter_runs`."""
    has_parts = any(part[0](row) for _, row in islice(rows.iter_rows(path), FIRST_ROWS))
    return sum(1 for _ in iter_runs(path, part)) if has_parts else rows.count_rows(path)


def _grouped(
    numbered: Iterator[tuple[int, Any]], group: Callable[[Row], Any] | None
) -> Iterator[tuple[int, list[Any]]]:
    """Group consecutive rows; yield (number of the first row, rows). An unreadable row is a group of its own."""
    number, values, last = 0, [], None
    for index, value in numbered:
        key = group(value) if group is not None and isinstance(value, Mapping) else None
        if values and key is not None and key == last:
            values.append(value)
            continue
        if values:
            yield number, values
        number, values, last = index, [value], key
    if values:
        yield number, values
