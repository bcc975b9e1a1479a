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

POLL_SECONDS = 0.1
REPEAT_SECONDS = 30.0


class LockHeld(RuntimeError):
    """Another holder has the lock; the message says which."""


@contextmanager
def file_lock(path: Path, *, wait: bool = True, log: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock on `path` (made where missing; its text names the holder while it is held).

    Every call opens the file anew, so two threads exclude each other as two processes do, and a holder that asks again
    waits for itself. Where a lock file is removed by its last holder, the next one locks the new file.

    Args:
        wait: false raises LockHeld at once where another holds it.
        log: told who holds it, at once and every 30 s while waiting; the module's logger by default.
    """
    tell = log or logging.getLogger(__name__).info
    path.parent.mkdir(parents=True, exist_ok=True)
    last_told = float("-inf")
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
            if time.monotonic() - last_told >= REPEAT_SECONDS:
                tell(f"waiting for {path.stem}, held by {holder_of(path)}")
                last_told = time.monotonic()
            time.sleep(POLL_SECONDS)
    try:
        command = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])[:200]
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "command": command, "since": since}).encode())
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
    """Who holds the lock, for people."""
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} ({holder['command']}) since {holder['since']}"
    except (OSError, ValueError, KeyError):
        return "another process"
