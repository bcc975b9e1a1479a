"""Locks between processes: their interface, waiting and messages, and the implementation by flock.

There are two scopes. *Lake* locks (partitions, publishing, trainings, journals, staging, the whole lake) exclude every
process that works in the lake: `lake_locks` returns flock on one machine, and those of the backend where
`ETPI_CLUSTER` names one. *Machine* locks (accelerator, sandboxes, server) exclude processes of one machine only:
`machine_locks` is always flock, and `Lake.machine_lock_file` is on the machine's own disk.

A lock is named by the path of a file, in which its holder writes its name. Every kind of lock ends with its holder.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from etpi_resources.backend import CLUSTER_VARIABLE, SETTINGS_FILE, BackendError, backend
from etpi_resources.errors import ExpectedError
from etpi_resources.process.progress import acting_name

POLL_SECONDS = 0.1
QUIET_SECONDS = 1.0
"""A wait longer than this is logged."""


class LockHeld(RuntimeError):
    """Another process or thread holds the lock; the message names it."""


class LockLost(ExpectedError, RuntimeError):
    """A lock ended before its holder had finished, so another process may work on the same thing already."""

    @classmethod
    def of(cls, held: Held) -> Self:
        return cls(
            f"the lock on {held.what} ended before this process had finished, so another may be at work on it: its "
            "session with Postgres ended (a restart, an administrator, the network), or its lock file was removed. "
            "Nothing was published; run the same command again"
        )


class Held(ABC):
    """A lock that this process took."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what

    @abstractmethod
    def still_held(self) -> bool:
        """Ask whether the lock is held now; false once it was lost."""

    @abstractmethod
    def release(self) -> None:
        """Release the lock; nothing happens if it was lost."""


class Locks(ABC):
    """One kind of lock. A lock excludes threads as it does processes; a thread that takes one twice deadlocks."""

    longest_poll = POLL_SECONDS
    """The longest time between two attempts of a waiting process; it grows from POLL_SECONDS."""

    @abstractmethod
    def is_held(self, path: Path) -> bool:
        """Return whether a process holds the lock now, alone or shared; this neither takes nor creates it."""

    @abstractmethod
    def try_lock(self, path: Path, what: str, shared: bool) -> Held | None:
        """Take the lock if it is free; None if another holds it."""

    def holder_of(self, path: Path) -> str:
        """Return the holder of a lock, with its host: the experiment it works for, else the process."""
        note = Note.of(path)
        return note.holder if note else "another process"

    @contextmanager
    def hold(
        self,
        *paths: Path,
        wait: bool = True,
        log: Callable[[str], None] | None = None,
        what: str | None = None,
        doing: str = "holding",
        shared: bool = False,
    ) -> Iterator[Held]:
        """Hold the lock named by a path, whose folder is created if missing; of several (a semaphore), the first free.

        Args:
            wait: false: raise LockHeld at once if the lock is held.
            log: called once, after a second of waiting, with a line that names the waiting and the holding process; by
                default the module's logger.
            what: what the lock protects, for that line ("the tiny base"); by default the file's name.
            doing: what a holder does with it ("building").
            shared: several may hold it at once, and none while another holds it alone. Such holders write no note.
        """
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        held = self._wait_for(paths, wait, log, what or paths[0].stem, doing, shared)
        (mine := _of_this_thread()).append(held)
        try:
            if not shared:
                _write_note(held.path)
            yield held
        finally:
            mine.remove(held)
            if not shared and held.still_held():
                _clear_note(held.path)
            held.release()

    def _wait_for(
        self, paths: Sequence[Path], wait: bool, log: Callable[[str], None] | None, what: str, doing: str, shared: bool
    ) -> Held:
        started, logged, pause = time.monotonic(), False, POLL_SECONDS
        while True:
            for path in paths:
                if held := self.try_lock(path, what, shared):
                    return held
            if not wait:
                raise LockHeld(f"{paths[0].stem} is held by {self._holders_of(paths)}")
            if not logged and time.monotonic() - started >= QUIET_SECONDS:
                me = acting_name() or f"process {os.getpid()}"
                line = (
                    f"{me} waits for {what} that {self._holders_of(paths)} {'is' if len(paths) == 1 else 'are'} {doing}"
                )
                (log or logging.getLogger(__name__).info)(line)
                logged = True
            time.sleep(pause)
            pause = min(pause * 1.2, self.longest_poll)

    def _holders_of(self, paths: Sequence[Path]) -> str:
        return " and ".join(self.holder_of(path) for path in paths)


_threads = threading.local()


def _of_this_thread() -> list[Held]:
    if not hasattr(_threads, "held"):
        _threads.held = []
    return _threads.held


def require_held() -> None:
    """Ask for each lock that this thread took whether it is still held. Call it right before a change that others see.

    Raises:
        LockLost: one was lost; the message says which and what to do.
    """
    for held in _of_this_thread():
        if not held.still_held():
            raise LockLost.of(held)


@dataclass(frozen=True)
class Note:
    """Text of a holder about itself in the lock's file. It serves messages only; a killed holder leaves it.

    Attributes:
        acting_for: the experiment or other partition that it works for.
        host: "" in a file written before notes had a host.
    """

    pid: int
    command: str
    since: str
    acting_for: str | None
    host: str

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Read a lock's file; None if it is missing or empty, as it is while nobody holds the lock alone."""
        try:
            note = json.loads(path.read_text())
            return cls(int(note["pid"]), str(note["command"]), str(note["since"]), note["for"], note.get("host", ""))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def holder(self) -> str:
        who = self.acting_for or f"process {self.pid} ({self.command}, since {self.since})"
        return f"{who} on {self.host}" if self.host else who


def _write_note(path: Path) -> None:
    command = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])[:200]
    since = datetime.now(UTC).isoformat(timespec="seconds")
    note = {"pid": os.getpid(), "command": command, "since": since, "for": acting_name(), "host": socket.gethostname()}
    with suppress(OSError):  # a lake that is read-only for a while loses no lock by it
        path.write_text(json.dumps(note))


def _clear_note(path: Path) -> None:
    with suppress(OSError):  # the holder may have removed the file
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


class FileLocks(Locks):
    """Locks by flock(2), which the kernel frees when the holder dies. They exclude processes of one machine.

    Every lock opens its file itself, so two threads exclude each other as two processes do. If a lock file was deleted
    meanwhile, the lock is taken on the new file, and its former holder has lost it.
    """

    def is_held(self, path: Path) -> bool:
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

    def try_lock(self, path: Path, what: str, shared: bool) -> Held | None:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            held = _HeldFile(path, what, descriptor)
            if held.still_held():
                return held
            held.release()


class _HeldFile(Held):
    def __init__(self, path: Path, what: str, descriptor: int) -> None:
        super().__init__(path, what)
        self._descriptor = descriptor

    def still_held(self) -> bool:
        """Return whether the path still names the locked file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        os.close(self._descriptor)


def lake_locks(root: Path | None = None) -> Locks:
    """Return the locks that exclude every process of a lake: Postgres' on a cluster, else flock.

    Args:
        root: the lake's folder, where it is known; without a cluster it must not be that of a cluster, whose other
            processes do not see flock.

    Raises:
        BackendError: the cluster's settings are wrong, or the lake belongs to a cluster that this process does not use.
    """
    elsewhere = backend()
    if elsewhere is None and root is not None and (named := root / SETTINGS_FILE).exists():
        raise BackendError(
            f"the lake {root} belongs to a cluster ({named.name} is in it), and {CLUSTER_VARIABLE} is not set: this "
            "process would take locks that no other node sees, and could publish what another node publishes. Run "
            f"`export {CLUSTER_VARIABLE}={named}` first. If the lake belongs to no cluster any more, remove that file"
        )
    return elsewhere.locks() if elsewhere else machine_locks()


def machine_locks() -> Locks:
    """Return the locks that exclude the processes of this machine."""
    return _FILE_LOCKS


_FILE_LOCKS = FileLocks()
