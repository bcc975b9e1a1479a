"""Trainings under way and held locks, from the files that workers and processes write. Read-only."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etpi_resources.lake.lake import Lake
from etpi_resources.process.locks import Note, lake_locks

METRICS, CONFIG = "metrics.jsonl", "config.json"
KINDS = {"train": "fine-tuning", "reinforce": "reinforcement"}
"""Scratch folders in which workers train -> their work."""


@dataclass(frozen=True)
class Training:
    """A worker's folder: its log so far and the share that is done, None where its config does not say.

    Attributes:
        lines: the complete lines of its metrics.jsonl.
    """

    name: str
    kind: str
    lines: list[dict[str, Any]]
    done: float | None
    written_at: float


@dataclass(frozen=True)
class HeldLock:
    """A lock that a process holds."""

    name: str
    pid: int
    command: str
    since: str
    working_for: str | None
    host: str


def trainings(lake: Lake) -> list[Training]:
    """Return the trainings whose folders are in the scratch (finished ones are removed), the last written first."""
    return sorted(_trainings(lake.root / "scratch"), key=lambda training: -training.written_at)


def _trainings(scratch: Path) -> Iterator[Training]:
    for kind in KINDS:
        for config_path in sorted(scratch.glob(f"{kind}/*/**/{CONFIG}")):
            folder = config_path.parent
            try:
                config = json.loads(config_path.read_bytes())
                written_at = max(p.stat().st_mtime for p in (config_path, folder / METRICS) if p.exists())
            except (OSError, ValueError):
                continue
            # A model's own config.json is in the same tree.
            if not isinstance(config, dict) or not ({"train", "rl", "recipe"} & config.keys()):
                continue
            lines = list(read_lines(folder / METRICS))
            name = folder.relative_to(scratch).as_posix()
            yield Training(name, KINDS[kind], lines, _share(config, lines), written_at)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSON-lines file; a line that is being written is left out."""
    try:
        content = path.read_bytes()
    except OSError:
        return
    for line in content.splitlines(keepends=True):
        if line.endswith(b"\n"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def _share(config: Mapping[str, Any], lines: list[dict[str, Any]]) -> float | None:
    if not lines:
        return 0.0
    last = lines[-1]
    steps = (config.get("rl") or {}).get("steps") or (config.get("train") or {}).get("max_steps")
    if steps and last.get("step") is not None:
        return min(1.0, last["step"] / steps)
    epochs = (config.get("train") or {}).get("epochs")
    if epochs and last.get("epoch") is not None:
        return min(1.0, last["epoch"] / epochs)
    return None


def held_locks(lake: Lake) -> list[HeldLock]:
    """Return the locks that are held, by name."""
    locks = []
    for path in lake.lock_files():
        note = Note.of(path)  # None: it is free, or just being taken
        if note and _holds(note, path):
            locks.append(HeldLock(path.stem, note.pid, note.command, note.since, note.acting_for, note.host))
    return locks


def _holds(note: Note, path: Path) -> bool:
    """Return whether the writer of a lock's note lives; on another machine, whether the lock is held."""
    if note.host in ("", socket.gethostname()):
        return Path(f"/proc/{note.pid}").exists() or not os.path.isdir("/proc/self")
    return lake_locks().is_held(path)


def age(written_at: float) -> float:
    """Return the seconds since a file was written."""
    return max(0.0, time.time() - written_at)
