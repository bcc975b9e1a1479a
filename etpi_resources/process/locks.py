"""File locks between processes, which the kernel frees when the holder dies."""

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
"""A wait longer than this is logged."""


class LockHeld(RuntimeError):
    """Another process or thread holds the lock; the message names it."""


@contextmanager
def file_lock(
    path: Path,
    *,
    wait: bool = True,
    log: Callable[[str], None] | None = None,
    what: str | None = None,
    doing: str = "holding",
    shared: bool = False,
) -> Iterator[None]:
    """Hold a lock on `path`, a file that is created if missing and names its holder.

    Every call opens the file itself, so two threads exclude each other as two processes do, and a thread that locks the
    same path twice deadlocks. If a lock file was deleted meanwhile, the lock is taken on the new file.

    Args:
        wait: false: raise LockHeld at once if the lock is held.
        log: called once, after a second of waiting, with a line that names the waiting and the holding process; by
            default the module's logger.
        what: what the lock protects, for that line ("the tiny base"); by default the file's name.
        doing: what a holder does with it ("building").
        shared: several may hold it at once, and none while another holds it alone. Such holders are not named.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    started, logged = time.monotonic(), False
    while (descriptor := _try_lock(path, shared)) is None:
        if not wait:
            raise LockHeld(f"{path.stem} is held by {holder_of(path)}")
        if not logged and time.monotonic() - started >= QUIET_SECONDS:
            me = acting_name() or f"process {os.getpid()}"
            (log or logging.getLogger(__name__).info)(
                f"{me} waits for {what or path.stem} that {holder_of(path)} is {doing}"
            )
            logged = True
        time.sleep(POLL_SECONDS)
    try:
        if shared:
            yield
            return
        command = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])[:200]
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        holder = {"pid": os.getpid(), "command": command, "since": since, "for": acting_name()}
        os.write(descriptor, json.dumps(holder).encode())
        yield
    finally:
        if not shared:
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock now, alone or shared; this neither takes nor creates it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _try_lock(path: Path, shared: bool) -> int | None:
    """Lock the file and return its descriptor; None if another holds the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _is_same_file(path, descriptor):
            return descriptor
        os.close(descriptor)


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Return whether `path` still names the locked file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def holder_of(path: Path) -> str:
    """Return the holder of a lock: the experiment it works for, else the process."""
    try:
        holder = json.loads(path.read_text())
        return holder["for"] or f"process {holder['pid']} ({holder['command']}, since {holder['since']})"
    except (OSError, ValueError, KeyError):
        return "another process"
