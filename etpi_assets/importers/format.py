"""What an importable format is: how it is recognised, found, counted and read, and what of it is kept.

Belongs here: the one description that the registry, detection and docs/formats.md are made of, and the two shapes a
format comes in (a rollout a file or folder; a rollout a row). Does not belong here: any format, or reading bytes
(`source`, `rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from etpi_assets.importers import rows
from etpi_assets.importers.conversation import Options
from etpi_assets.importers.source import Unreadable, bytes_of, content_hash_of
from etpi_assets.tasks.family import Refusal
from etpi_assets.trajectories.records import RolloutRecord

Item = RolloutRecord | Refusal
Row = Mapping[str, Any]
FOLDERS, ROWS, PLAIN = 0, 1, 2
"""Ranks: one program's files and folders; documents and rows of a known form; rows that hold nothing but messages."""


class Look:
    """A folder or file as detection sees it; each thing is looked at once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def files(self) -> list[Path]:
        return sorted(f for f in self.root.rglob("*") if f.is_file()) if self.root.is_dir() else [self.root]

    @cached_property
    def row(self) -> Row | None:
        """The first row that can be read of the first files that hold rows."""
        for path in rows.row_files(self.files)[:8]:
            for _, value in rows.iter_rows(path):
                if isinstance(value, Mapping) and not rows.is_manifest(value):
                    return value
                break
        return None


@dataclass(frozen=True)
class Format:
    """One importable format.

    Attributes:
        name: what a rollout set's `format` says.
        title: what it is, in one line.
        files: which files hold it.
        keeps, loses: what of it arrives in the tables, and what does not, for docs/formats.md.
        rank: of several formats that claim a folder, the lowest rank has it.
        claims: whether a folder or file holds it.
        units: every input below a root that it accounts for, sorted: a run's folder, or a file.
        count: how many rollouts and refusals a unit gives, taken without reading what they say.
        read: a unit's rollouts and refusals.
    """

    name: str
    title: str
    files: str
    keeps: str
    loses: str
    rank: int
    claims: Callable[[Look], bool]
    units: Callable[[Path], list[Path]]
    count: Callable[[Path], int]
    read: Callable[[Path, Path, Options], Iterator[Item]]


def of_runs(
    name: str,
    *,
    title: str,
    files: str,
    keeps: str,
    loses: str,
    claims: Callable[[Look], bool],
    units: Callable[[Path], list[Path]],
    record: Callable[[Path, Path, Options], RolloutRecord],
    rank: int = FOLDERS,
) -> Format:
    """A format with a rollout a file or folder. `record(unit, root, options)` raises Unreadable, and nothing else,
    where there is none."""

    def read(unit: Path, root: Path, options: Options) -> Iterator[Item]:
        source = source_of(unit, root)
        try:
            made = record(unit, root, options)
        except Unreadable as refused:
            yield Refusal(source, refused.reason, refused.detail)
            return
        made.source = source
        yield made

    return Format(name, title, files, keeps, loses, rank, claims, units, lambda unit: 1, read)


def of_rows(
    name: str,
    *,
    title: str,
    keeps: str,
    loses: str,
    claims: Callable[[Row], bool],
    record: Callable[[list[Row], str, Options], RolloutRecord],
    group: Callable[[Row], Any] | None = None,
    rank: int = ROWS,
) -> Format:
    """A format with a rollout a row of JSON lines, a JSON array or parquet.

    Args:
        claims: whether a row is of this format.
        record: (rows, name, options) -> the rollout; raises Unreadable, and nothing else, where there is none.
        group: what rows that stand one after the other share where they are one rollout; None: a row is a rollout.
    """

    def count(unit: Path) -> int:
        if group is None:
            return rows.count_rows(unit)
        return sum(1 for _ in _grouped(rows.iter_rows(unit), group))

    def read(unit: Path, root: Path, options: Options) -> Iterator[Item]:
        source = source_of(unit, root)
        for number, values in _grouped(rows.iter_rows(unit), group):
            where = f"{source}, row {number}"
            try:
                for value in values:
                    if isinstance(value, Unreadable):
                        raise value
                    if not isinstance(value, Mapping):
                        raise Unreadable("unknown_form", f"{where} is {type(value).__name__}, expected an object")
                    if rows.is_manifest(value):
                        raise Unreadable("not_a_rollout", f"{where} is the manifest of an export")
                made = record(values, where, options)
            except Unreadable as refused:
                yield Refusal(source, refused.reason, refused.detail, number)
                continue
            made.rollout_id = content_hash_of(f"{source}#{number}", [bytes_of(value) for value in values])
            made.source = f"{source}#{number}"
            yield made

    def holds(look: Look) -> bool:
        return look.row is not None and claims(look.row)

    files = "`.jsonl`, `.json`, `.parquet`, also with `.gz` or `.zst`; a rollout " + (
        "a row" if group is None else "a run of rows"
    )
    return Format(name, title, files, keeps, loses, rank, holds, rows.units, count, read)


def source_of(unit: Path, root: Path) -> str:
    """Where a unit stands, relative to the root; its name where it is the root."""
    return unit.relative_to(root).as_posix() if unit != root else unit.name


def _grouped(found: Iterator[tuple[int, Any]], group: Callable[[Row], Any] | None) -> Iterator[tuple[int, list[Any]]]:
    """Rows that belong together, under the number of the first; what cannot be read stands by itself."""
    number, values, last = 0, [], None
    for index, value in found:
        key = group(value) if group is not None and isinstance(value, Mapping) else None
        if values and key is not None and key == last:
            values.append(value)
            continue
        if values:
            yield number, values
        number, values, last = index, [value], key
    if values:
        yield number, values
