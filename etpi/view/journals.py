"""Journals of collections under way, read while another process appends to them. Never locks or writes."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from etpi_resources.inside import is_file_inside, open_file
from etpi_resources.lake.lake import Lake
from etpi_resources.outside import loads

ACTIVE_SECONDS = 180.0
"""A journal that was written to within this time is shown as under way."""
READ_BYTES = 24_000_000
"""The most that one request reads of a journal; the next one continues."""
NEWEST = 8
WINDOW_SECONDS = 300.0
"""The time over which the speed is measured."""
_TABLES = ("rollouts", "agents", "turns", "messages")
_NAME = re.compile(r"(rollouts|evaluations)/[\w.+-]+(/[\w.+-]+)?/journal-[0-9a-f]{1,64}\.jsonl")


@dataclass(frozen=True)
class Finished:
    """A finished rollout of a journal; `offset` is the position of its line in bytes."""

    offset: int
    rollout_id: str
    task_id: str | None
    sample: int | None
    verdict: str
    exit_status: str | None
    role: str | None
    condition: str
    experiment: str | None
    suite: str | None
    turns: int
    finished_at: float | None


@dataclass
class JournalState:
    """The part of a journal that was read so far.

    Attributes:
        name: its path in the scratch folder.
        unreadable: complete lines that are no rollout.
        newest: the last first.
    """

    name: str
    inode: int
    size: int = 0
    written_at: float = 0.0
    offset: int = 0
    n: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    newest: deque[Finished] = field(default_factory=lambda: deque(maxlen=NEWEST))
    times: deque[float] = field(default_factory=lambda: deque(maxlen=2000))
    unreadable: int = 0

    @property
    def kind(self) -> str:
        """Return "rollouts" or "evaluations"."""
        return self.name.split("/")[0]

    @property
    def key(self) -> str:
        """Return the rollout set, or the folder of an evaluation."""
        return self.name.split("/")[1]

    @property
    def read(self) -> float:
        """Return the share of its bytes that was read."""
        return self.offset / self.size if self.size else 1.0

    @property
    def per_minute(self) -> float | None:
        """Return the finished rollouts a minute lately, None if unknown."""
        now = time.time()
        recent = [at for at in self.times if at > now - WINDOW_SECONDS]
        span = now - min(recent) if recent else 0.0
        return 60 * len(recent) / span if len(recent) > 1 and span else None


@dataclass(frozen=True)
class Training:
    """A training under way: its logged steps, and the share of it that is done, 0.0 if unknown."""

    label: str
    steps: list[dict[str, Any]]
    share: float

    @property
    def seconds_left(self) -> float | None:
        return self.steps[-1]["seconds"] * (1 / self.share - 1) if self.share else None


class Journals:
    """Reads a lake's journals, continuing where it stopped."""

    def __init__(self, lake: Lake) -> None:
        self._scratch = lake.root / "scratch"
        self._states: dict[str, JournalState] = {}
        self._lock = threading.Lock()

    def states(self) -> list[JournalState]:
        """Return the journals under way, the last written first."""
        states = [self._state(path) for path in self._paths()]
        return sorted((s for s in states if s), key=lambda state: -state.written_at)

    def trainings(self) -> list[Training]:
        """Return the trainings under way."""
        now = time.time()
        trainings: list[Training] = []
        for path in sorted(self._scratch.glob("*/*/metrics.jsonl")):
            with suppress(OSError, ValueError):  # the folder goes when the training is stored
                if now - path.stat().st_mtime < ACTIVE_SECONDS:
                    config = json.loads(path.with_name("config.json").read_text())
                    lines = path.read_text().splitlines(keepends=True)
                    label = str(config.get("label", path.parent.name[:12]))
                    steps = [{"curve": label} | json.loads(line) for line in lines if line.endswith("\n")]
                    trainings.append(Training(label, steps, _share(config, steps[-1]) if steps else 0.0))
        return trainings

    def rows(self, name: str, offset: int) -> dict[str, list[dict[str, Any]]] | None:
        """Return the rows of the rollout at a position of a journal; None if there is no such line."""
        if not _NAME.fullmatch(name) or not is_file_inside(self._scratch, name):
            return None
        try:
            with open_file(self._scratch / name) as file:
                if offset:
                    file.seek(offset - 1)
                    if file.read(1) != b"\n":
                        return None
                line = file.readline()
            if _finished(line, offset) is None or not line.endswith(b"\n"):
                return None
            rows = json.loads(line)["rows"]
            return rows if all(isinstance(rows.get(table), list) for table in _TABLES) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _paths(self) -> Iterator[Path]:
        for pattern in ("rollouts/*/*/journal-*.jsonl", "evaluations/*/journal-*.jsonl"):
            yield from (path for path in self._scratch.glob(pattern) if ".aside" not in path.name)

    def _state(self, path: Path) -> JournalState | None:
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        if time.time() - stat.st_mtime >= ACTIVE_SECONDS:
            return None
        name = path.relative_to(self._scratch).as_posix()
        with self._lock:
            state = self._states.get(name)
            if state is None or state.inode != stat.st_ino or state.offset > stat.st_size:
                state = self._states[name] = JournalState(name, stat.st_ino)
            state.size, state.written_at = stat.st_size, stat.st_mtime
            _read(state, path)
            return deepcopy(state)


def _read(state: JournalState, path: Path) -> None:
    """Add the rollouts that were written since, of READ_BYTES at most."""
    end = state.offset + READ_BYTES
    with path.open("rb") as file:
        file.seek(state.offset)
        while state.offset < end:
            line = file.readline()
            if not line.endswith(b"\n"):  # the writer is in the middle of it
                break
            finished = _finished(line, state.offset)
            state.offset += len(line)
            if finished is None:
                state.unreadable += 1
                continue
            state.n += 1
            state.verdicts[finished.verdict] += 1
            state.newest.appendleft(finished)
            if finished.finished_at is not None:
                state.times.append(finished.finished_at)


def _share(config: Mapping[str, Any], last: Mapping[str, Any]) -> float:
    rl, train = config.get("rl") or {}, config.get("train") or {}
    steps = rl.get("steps") or train.get("max_steps")
    done, whole = (last["step"], steps) if steps else (last.get("epoch"), train.get("epochs"))
    return min(1.0, done / whole) if done and whole else 0.0


def _finished(line: bytes, offset: int) -> Finished | None:
    try:
        rows = loads(line)["rows"]
        (row,) = rows["rollouts"]
        outcome = row.get("outcome")
        outcome = loads(outcome) if isinstance(outcome, str) else outcome or {}
        started, seconds = row.get("started_at"), row.get("wall_seconds")
        at = datetime.fromisoformat(started).timestamp() + (seconds or 0.0) if started else None
        verdict = "infrastructure" if row.get("error") else str(outcome.get("verdict") or "unknown")
        return Finished(
            offset, str(row["rollout_id"]), row.get("task_id"), row.get("sample"), verdict, row.get("exit_status"),
            row.get("checkpoint_role"), f"{row.get('decoding') or ''} sample {row.get('sample_seed') or 0}".strip(),
            row.get("experiment"), row.get("suite"), len(rows["turns"]), at,
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
