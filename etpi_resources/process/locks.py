"""Locks between processes that the kernel frees when their holder dies.

Belongs here: taking a lock file, and saying who holds it. Does not belong here: what a lock protects.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from etpi_resources.process.progress import acting_name

POLL_SECONDS = 0.1
QUIET_SECONDS = 1.0
"""A wait is reported once it has lasted so long."""


class LockHeld(RuntimeError):
    """Another holder has the lock; the message says which."""


@contextmanager
def file_lock(
    path: Path,
    *,
    wait: bool = True,
    log: Callable[[str], None] | None = None,
    what: str | None = None,
    doing: str = "holding",
) -> Iterator[None]:
    """Hold an exclusive lock on `path` (made where missing; its text names the holder while it is held).

    Every call opens the file anew, so two threads exclude each other as two processes do, and a holder that asks again
    waits for itself. Where a lock file is removed by its last holder, the next one locks the new file.

    Args:
        wait: false raises LockHeld at once where another holds it.
        log: told once, after a second of waiting, who waits for what that whom is doing what with; the module's logger
            by default.
        what: what the lock protects, in words ("the tiny base"); the file's name by default.
        doing: what a holder does with it ("building").
    """
    tell = log or logging.getLogger(__name__).info
    path.parent.mkdir(parents=True, exist_ok=True)
    started, told = time.monotonic(), False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, descriptor):
                break
            os.close(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            if not wait:
                raise LockHeld(f"{path.stem} is held by {holder_of(path)}") from None
            if not told and time.monotonic() - started >= QUIET_SECONDS:
                me = acting_name() or f"process {os.getpid()}"
                tell(f"{me} waits for {what or path.stem} that {holder_of(path)} is {doing}")
                told = True
            time.sleep(POLL_SECONDS)
    try:
        command = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])[:200]
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        holder = {"pid": os.getpid(), "command": command, "since": since, "for": acting_name()}
        os.write(descriptor, json.dumps(holder).encode())
        yield
    finally:
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the locked file is still the one that `path` names."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def holder_of(path: Path) -> str:
    """Who holds the lock: the experiment it works for, else the process."""
    try:
        holder = json.loads(path.read_text())
        return holder["for"] or f"process {holder['pid']} ({holder['command']}, since {holder['since']})"
    except (OSError, ValueError, KeyError):
        return "another process"
