"""Finished rollouts on disk, one line each, until they become tables; a killed run resumes from them.

A line is a JSON object: `key` (the rollout id), `spec_key`, `prompts` (the digest of its prompts as captured) and
`rows` (the rollout as rows of the four tables, prompts in their prefix form). It is synced to disk before its rollout
counts as finished. A kill can truncate the last line only; opening cuts it off, and its rollout runs again.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from etpi_assets.agent.loop import rollout_id
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import captured_digest, named_rows, to_record, to_rows
from etpi_resources.outside import without_surrogates
from etpi_resources.process.locks import LockHeld, LockLost, lake_locks

_TIMES = {"rollouts": "started_at", "turns": "at", "messages": "at"}


class JournalError(RuntimeError):
    """The journal cannot be used; the message says which file and line, and what to do."""


@dataclass(frozen=True)
class _JournalLine:
    """Position of a line in bytes, and its (suite, task id, task hash, sample)."""

    offset: int
    length: int
    attempt: tuple[str | None, str | None, str | None, int]


class Journal:
    """The journal of one spec key, `<folder>/journal-<spec key>.jsonl`; a context manager.

    One process at a time may open it, by the lock `.journal-<spec key>.lock`; its threads may share it.
    Memory holds positions, not rollouts.

    Args:
        wait: wait for another process that has it open, instead of raising.
    """

    def __init__(self, folder: Path, spec_key: str, *, wait: bool = False) -> None:
        self.spec_key, self._wait = spec_key, wait
        self.path = folder / f"journal-{spec_key[:16]}.jsonl"
        self._entries: dict[str, _JournalLine] = {}
        self._lock = threading.Lock()
        self._fd: int | None = None

    def __enter__(self) -> Self:
        """Index the lines and cut off an incomplete last one.

        Raises:
            JournalError: another process has it open, or a line does not match its key.
        """
        with ExitStack() as stack:
            lock, what = self.path.with_name(f".{self.path.stem}.lock"), f"the journal {self.path.name}"
            try:
                self._held = stack.enter_context(lake_locks().hold(lock, wait=self._wait, what=what, doing="writing"))
            except LockHeld as error:
                raise JournalError(
                    f"{self.path} is open in another process; wait for it to end, or stop it: {error}"
                ) from None
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            stack.callback(self._close)
            self._read()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, task: Task, sample: int) -> bool:
        """Return whether the rollout of this task content and sample is finished.

        Raises:
            JournalError: the line with its key belongs to another task.
        """
        key = rollout_id(task, sample, self.spec_key)
        entry = self._entries.get(key)
        if entry is not None and entry.attempt != (task.suite, task.task_id, task.content_hash, sample):
            raise JournalError(f"{self.path}: {key} holds {entry.attempt}, asked for {task.task_id}; remove the file")
        return entry is not None

    def get(self, task: Task, sample: int) -> RolloutRecord:
        """Read that rollout. Raises KeyError if it is not finished, JournalError as `has` does."""
        if not self.has(task, sample):
            raise KeyError(f"{self.path} has no finished rollout of {task.task_id} sample {sample}")
        entry = self._entries[rollout_id(task, sample, self.spec_key)]
        assert self._fd is not None
        return from_line(os.pread(self._fd, entry.length, entry.offset), self.spec_key)

    def append(self, record: RolloutRecord) -> None:
        """Write a finished rollout and sync it to disk.

        Raises:
            JournalError: its key is there already.
            LockLost: another process may write to the journal; nothing was written.
        """
        line = to_line(record, self.spec_key)
        with self._lock:
            if self._fd is None:
                raise JournalError(f"{self.path} is not open")
            if not self._held.still_held():
                raise LockLost.of(self._held)
            if os.fstat(self._fd).st_size != self._end:
                self._read()  # an interrupt ended an earlier call between its write and its entry
            if record.rollout_id in self._entries:
                raise JournalError(f"{self.path}: {record.rollout_id} is there already")
            view, at = memoryview(line), self._end
            while view:
                written = os.pwrite(self._fd, view, at)
                view, at = view[written:], at + written
            os.fdatasync(self._fd)
            self._note(record, len(line))

    @property
    def size(self) -> int:
        """Bytes of the finished rollouts; `set_aside` takes it."""
        with self._lock:
            return self._end

    def set_aside(self, size: int) -> tuple[int, Path]:
        """Move the rollouts after the first `size` bytes to a file beside the journal, so that they run again.

        Returns:
            their number, and the file, which has those of earlier calls too.
        """
        path = self.path.with_suffix(".aside.jsonl")
        with self._lock:
            assert self._fd is not None
            lines = os.pread(self._fd, self._end - size, size)
            if lines:
                with path.open("ab") as file:
                    file.write(lines)
                    file.flush()
                    os.fsync(file.fileno())
                self._entries = {key: line for key, line in self._entries.items() if line.offset < size}
                os.ftruncate(self._fd, size)
        return lines.count(b"\n"), path

    @property
    def _end(self) -> int:
        """The position behind the last entry: no interrupt can come between an entry and its end."""
        last = next(reversed(self._entries.values()), None)
        return last.offset + last.length if last else 0

    def _read(self) -> None:
        """Index the lines behind the last entry and cut off an incomplete last one."""
        assert self._fd is not None
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(self._end)
            for number, line in enumerate(file, len(self._entries) + 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = from_line(line, self.spec_key)
                except (ValueError, KeyError, TypeError) as error:
                    raise JournalError(
                        f"{self.path} line {number}: {error}; remove the file, and its rollouts will run again"
                    ) from None
                if record.rollout_id in self._entries:
                    raise JournalError(f"{self.path} line {number}: {record.rollout_id} occurs twice; remove the file")
                self._note(record, len(line))
        os.ftruncate(self._fd, self._end)

    def _note(self, record: RolloutRecord, length: int) -> None:
        self._entries[record.rollout_id] = _JournalLine(self._end, length, _attempt(record))

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def to_line(record: RolloutRecord, spec_key: str) -> bytes:
    """Return a record's line. Halves of surrogate pairs in its texts, which no file of text can hold, become U+FFFD."""
    line = {
        "key": record.rollout_id,
        "spec_key": spec_key,
        "prompts": captured_digest(record),
        "rows": named_rows(to_rows(record)),
    }
    text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return without_surrogates(text).encode() + b"\n"


def from_line(line: bytes, spec_key: str | None = None) -> RolloutRecord:
    """Decode a line. Raises ValueError if its key, under `spec_key` or its own, or its digest does not match."""
    value = json.loads(line)
    wanted: str = value["spec_key"] if spec_key is None else spec_key
    rows: Mapping[str, list[dict[str, Any]]] = value["rows"]
    for table, column in _TIMES.items():
        for row in rows[table]:
            row[column] = row[column] and datetime.fromisoformat(row[column])
    record = to_record(rows)
    if value["spec_key"] != wanted or value["key"] != record.rollout_id:
        raise ValueError(f"the line is of {value['key']} under spec {value['spec_key']}, not {wanted}")
    if captured_digest(record) != value["prompts"]:
        raise ValueError(f"the prompts of {record.rollout_id} are not those that were captured")
    suite, task_id, task_hash, sample = _attempt(record)
    task = Task(task_id or "", suite or "", "", "", "", {}, task_hash or "")
    if rollout_id(task, sample, wanted) != record.rollout_id:
        raise ValueError(f"key {record.rollout_id} is not that of task {task_id} sample {sample}")
    return record


def _attempt(record: RolloutRecord) -> tuple[str | None, str | None, str | None, int]:
    return record.suite, record.task_id, record.task_hash, record.sample


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} in a rollout record; it has no JSON form")
