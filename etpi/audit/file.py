"""Audit a training file: stream its rows through worker processes, and find repeats over all of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from etpi.audit.examine import Chain, Examiner, RawRow
from etpi.audit.report import SHOWN, Example, Report
from etpi.init.student import read_student
from etpi_assets.curation.gates import prompt_length_ratio
from etpi_assets.importers import Plan, UnknownFormat, importer_named, plan, read_map, read_options
from etpi_assets.importers.account import Account, findings
from etpi_assets.importers.format import ImportResult, source_of
from etpi_assets.specs.experiment import GatesSection
from etpi_resources.process.pool import ordered_map, workers_for
from etpi_resources.rows import files_below, row_files

_BLOCK = 32
_SECONDS_PER_BYTE, _PACKED = 4e-6, 8
"""Estimated seconds of one core for a byte of rows, and bytes of rows in one of a compressed file."""
_LENGTH_RATIO = 3.0
"""Prompts of training and evaluation whose medians differ by more are of another length."""
_LEAST_OFFERED, _LEAST_CALLING = 100, 0.01
"""Turns of rows with tools from which calls are counted, and the share of them that has to call one."""


def audit_file(
    path: Path, model: str, heldout: Path | None = None, format: str = "auto", columns: str | None = None
) -> Report:
    """Return the findings on the rows of a file or folder. `columns`: the map of rows of no known format.

    Raises FileNotFoundError, ValueError: nothing is there, no row is, or as `importers.plan` and `Examiner`.
    """
    notes = list[str]()
    read = read_map(columns) if columns else None
    try:
        chosen = plan("mapped" if read else format, path)
    except UnknownFormat as unknown:
        if not row_files(files_below(path)):
            raise
        chosen, notes = plan("messages", path), [str(unknown)]
    formats = "unknown" if notes else "+".join(chosen.formats)
    report, repeats, firsts = Report(str(path), formats, notes=notes), _Repeats(), array("I")
    packed = (".parquet", ".gz", ".zst")
    size = sum(file.stat().st_size * (_PACKED if file.name.endswith(packed) else 1) for file in files_below(path))
    factory, account = partial(Examiner, model, heldout, read), Account()
    workers = workers_for(size * _SECONDS_PER_BYTE)
    blocks = _blocks(_items(chosen, path, model, account))
    for part, chains, prompts in ordered_map(factory, blocks, workers=workers, reads=[path]):
        report.add(part)
        repeats.add(chains)
        firsts.extend(prompts)
    if not report.rows:
        raise ValueError(next(iter(report.notes), f"{path} has no rows of {formats}"))
    repeats.report(report)
    account.evidence |= report.unread
    if unread := [each for each in findings(account.figures()) if each.stops]:
        rows = min(report.rows, max(each.count for each in unread))
        examples = [Example(report.path, f"{each.name}: {each.count:,} values, {each.kind}") for each in unread]
        report.finding("unread").add(rows, 0, examples)
    if report.offered >= _LEAST_OFFERED and report.calling < _LEAST_CALLING * report.offered:
        example = Example(report.path, f"{report.calling} of {report.offered} turns call a tool")
        report.finding("few_calls").add(*report.offering, [example])
    if report.heldout:
        gate = prompt_length_ratio(firsts, report.heldout, GatesSection(prompt_length_ratio=_LENGTH_RATIO))
        report.notes.append(gate.message)
        if not gate.passed:
            report.finding("prompt_length").add(len(firsts), report.label_tokens, [Example(report.path, gate.message)])
    return report


def _items(chosen: Plan, path: Path, model: str, account: Account) -> Iterator[RawRow | ImportResult]:
    """Yield the rows of formats of rows unread, so that workers read them, and the rollouts of other formats."""
    options = {}
    for name, units in chosen.inputs:
        importer = importer_named(name)
        for unit in units:
            if importer.of_row is None:
                if not options and (chat := read_student(model).chat):
                    options = {"tokenizer": chat.name}
                yield from importer.results(unit, path, read_options(options, account))
                continue
            for number, row in importer.iter_rows(unit):
                yield RawRow(name, unit, source_of(unit, path), number, row)
    yield from chosen.unread


def _blocks(items: Iterator[Any]) -> Iterator[tuple[str, list[Any]]]:
    number = 0
    while block := list(islice(items, _BLOCK)):
        yield f"rows {number} to {number + len(block)}", block
        number += len(block)


@dataclass
class _Repeats:
    """The conversations of all rows, in 16 bytes for each turn and 12 for each row."""

    places: list[tuple[int, str]] = field(default_factory=list)
    """(number of the first conversation, file) where the file changes."""
    rows: array[int] = field(default_factory=lambda: array("I"))
    wholes: array[int] = field(default_factory=lambda: array("Q"))
    turn_rows: array[int] = field(default_factory=lambda: array("I"))
    digests: array[int] = field(default_factory=lambda: array("Q"))
    tokens: array[int] = field(default_factory=lambda: array("I"))

    def add(self, chains: Iterable[Chain]) -> None:
        for place, whole, turns in chains:
            source, _, row = place.rpartition("#")
            source, number = (source, int(row)) if row.isdecimal() else (place, 0)
            if not self.places or self.places[-1][1] != source:
                self.places.append((len(self.wholes), source))
            self.rows.append(number)
            for digest, tokens in turns:
                self.turn_rows.append(len(self.wholes))
                self.digests.append(digest)
                self.tokens.append(tokens)
            self.wholes.append(whole)

    def report(self, report: Report) -> None:
        """Add the rows that an earlier one repeats, and those with turns that an earlier row trains too."""
        _, again = _earlier(self.wholes)
        first, repeated = _earlier(self.digests)
        rows, tokens = np.asarray(self.turn_rows, np.int64), np.asarray(self.tokens, np.int64)
        for kind, chosen in (("repeated_row", repeated & again[rows]), ("repeated_turn", repeated & ~again[rows])):
            turns = np.flatnonzero(chosen)
            hit, at = np.unique(rows[turns], return_index=True)
            if len(hit):
                examples = [
                    Example(self._place(int(row)), f"its turns are in {self._place(int(rows[first[turns[i]]]))} too")
                    for row, i in zip(hit[:SHOWN], at[:SHOWN], strict=True)
                ]
                report.finding(kind).add(len(hit), int(tokens[turns].sum()), examples)

    def _place(self, conversation: int) -> str:
        source = next(name for start, name in reversed(self.places) if start <= conversation)
        return f"{source}, row {self.rows[conversation]}"


def _earlier(digests: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first place of each digest, and whether that is an earlier one."""
    values = np.asarray(digests, np.uint64)
    _, firsts, inverse = np.unique(values, return_index=True, return_inverse=True)
    first = firsts[inverse] if len(values) else np.zeros(0, np.int64)
    return first, first < np.arange(len(values))
