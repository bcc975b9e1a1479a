"""Lake locks of a cluster: Postgres' session-level advisory locks, which end with the session that took them.

A process has one session. Within a session an advisory lock may be taken again, so a table of what this process holds
excludes its threads from each other. Several things end a session: its process (Postgres frees the lock at once), the
host or the network (Postgres notices within KEEPALIVE_SECONDS), a restart of Postgres, an administrator. Then all locks
of the process are lost together, `still_held` says so, and the next lock opens another session.

A lock's key is 64 bits of a sha256 over the cluster's lake and the path of the lock in it. If two names had the same
key (probability 3e-12 for ten thousand names), their holders would wait for each other; nothing would be lost.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.extensions

from etpi_resources.backend import BackendError
from etpi_resources.process.locks import Held, Locks, Note

KEEPALIVE_SECONDS = 25
"""After this time without a sign of life from a host, Postgres ends its sessions, and their locks are free."""
_PROBES = {"tcp_keepalives_idle": 10, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3}
_UNANSWERED_MS = 1000 * KEEPALIVE_SECONDS
START_SECONDS = 60.0
"""Time to wait for Postgres to answer: it may be restarting."""

_TRY = {False: "SELECT pg_try_advisory_lock(%s)", True: "SELECT pg_try_advisory_lock_shared(%s)"}
_UNLOCK = {False: "SELECT pg_advisory_unlock(%s)", True: "SELECT pg_advisory_unlock_shared(%s)"}
_HOLDERS = """
SELECT a.pid = pg_backend_pid(), a.application_name
FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.classid::bigint = %s AND l.objid::bigint = %s
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY a.backend_start
"""


class PostgresUnavailable(BackendError):
    """Postgres does not answer, or refuses the session."""


class PostgresLocks(Locks):
    """The locks of one process in one lake. Threads may share it."""

    longest_poll = 1.0

    def __init__(self, url: str, lake: Path) -> None:
        """Take the URL of Postgres and the lake's folder as the settings name it; connect with the first lock."""
        self._url = url.replace("postgresql+psycopg2://", "postgresql://", 1)
        self._lake, self._resolved = lake, lake.resolve()
        self._session: _Session | None = None
        self._guard = threading.RLock()

    def key_of(self, path: Path) -> int:
        """Return the signed 64-bit key of a lock. It is the same on every node, wherever links of the path lead."""
        path = path.parent.resolve() / path.name
        name = path.relative_to(self._resolved) if path.is_relative_to(self._resolved) else path
        digest = hashlib.sha256(f"{self._lake}\0{name}".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)

    def try_lock(self, path: Path, what: str, shared: bool) -> Held | None:
        key = self.key_of(path)
        with self._guard:
            session = self._answering(lambda session: session.try_lock(key, shared))
            return session and _HeldAdvisory(path, what, self._guard, session, key, shared)

    def is_held(self, path: Path) -> bool:
        return bool(self._holders(path))

    def holder_of(self, path: Path) -> str:
        """Return the holder by its note if that is of a session that holds the lock, else by host and process."""
        sessions = [name for _, name in self._holders(path)]
        note = Note.of(path)
        if note and session_name(note.host, note.pid) in sessions:
            return note.holder
        places = [name.removeprefix("etpi ").rpartition(":") for name in sessions]
        return " and ".join(f"process {pid} on {host}" for host, _, pid in places) or "another process"

    def _holders(self, path: Path) -> list[tuple[bool, str]]:
        key = self.key_of(path)
        with self._guard:
            return self._answering(lambda session: session.holders(key))

    def _answering(self, ask: Callable[[_Session], Any]) -> Any:
        """Ask the session, and once more a new one if it has ended."""
        for last in (False, True):
            if self._session is None or self._session.ended:
                self._session = _Session(self._url)
            try:
                return ask(self._session)
            except psycopg2.Error as error:
                self._session.end()
                if last:
                    raise PostgresUnavailable(f"Postgres took no lock: {without_password(error, self._url)}") from None
        raise AssertionError


class _HeldAdvisory(Held):
    def __init__(
        self, path: Path, what: str, guard: threading.RLock, session: _Session, key: int, shared: bool
    ) -> None:
        super().__init__(path, what)
        self._guard, self._session, self._key, self._shared = guard, session, key, shared

    def still_held(self) -> bool:
        """Ask Postgres; false if it does not answer: it may have ended the session."""
        if self._session.process != os.getpid():
            return False  # a forked child holds nothing
        with self._guard:
            return self._session.holds(self._key)

    def release(self) -> None:
        if self._session.process == os.getpid():
            with self._guard:
                self._session.unlock(self._key, self._shared)


class _Session:
    """A connection, and what this process holds by it: {key: number of shared holders, or 0 for one alone}."""

    def __init__(self, url: str) -> None:
        self.ended = False
        self.process, self._taken = os.getpid(), dict[int, int]()
        self._connection = _connect(url)

    def try_lock(self, key: int, shared: bool) -> _Session | None:
        """Take the lock; None if a thread of this process or another session holds it."""
        holders = self._taken.get(key)
        if holders is not None and not (shared and holders):
            self.holders(key)  # raises if the session has ended: then this process holds nothing by it
            return None
        if not self._ask(_TRY[shared], key)[0][0]:
            return None
        self._taken[key] = (holders or 0) + 1 if shared else 0
        return self

    def unlock(self, key: int, shared: bool) -> None:
        holders = self._taken.pop(key)
        if holders > 1:
            self._taken[key] = holders - 1
        if not self.ended:
            try:
                self._ask(_UNLOCK[shared], key)
            except psycopg2.Error:
                self.end()

    def holds(self, key: int) -> bool:
        """Ask whether this session holds the lock. A pooler that hands out other sessions reads as false."""
        if self.ended:
            return False
        try:
            return any(is_this for is_this, _ in self.holders(key))
        except psycopg2.Error:
            self.end()
            return False

    def holders(self, key: int) -> list[tuple[bool, str]]:
        """Return (whether it is this session, application name) for each session that holds the lock."""
        return self._ask(_HOLDERS, key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF)

    def end(self) -> None:
        """Give the session up: every lock it held counts as lost."""
        self.ended = True
        self._connection.close()

    def _ask(self, sql: str, *values: int) -> list[Any]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, values)
            return cursor.fetchall()


def session_name(host: str, pid: int) -> str:
    """Return the `application_name` of a process' session: "etpi HOST:PID", within Postgres' 63 bytes."""
    return f"etpi {host[:40]}:{pid}"


def _connect(url: str) -> Any:
    """Open a session that both ends give up when the network is cut.

    Raises:
        PostgresUnavailable: it did not answer within START_SECONDS, or refuses; no message contains a password.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connection = psycopg2.connect(
                url, application_name=session_name(socket.gethostname(), os.getpid()), connect_timeout=10,
                keepalives=1, keepalives_idle=10, keepalives_interval=5, keepalives_count=3,
                tcp_user_timeout=_UNANSWERED_MS,
            )  # fmt: skip
            connection.autocommit = True  # a transaction left open would hold Postgres' clean-up back
            with connection.cursor() as cursor:
                for name, value in {**_PROBES, "tcp_user_timeout": _UNANSWERED_MS, "idle_session_timeout": 0}.items():
                    cursor.execute("SELECT set_config(%s, %s, false)", (name, str(value)))
            return connection
        except psycopg2.ProgrammingError:
            # The message quotes the URL, whose password cannot be found in it.
            raise PostgresUnavailable(
                "the cluster's `postgres` is not a URL that Postgres reads: postgresql://USER@HOST:PORT/DATABASE"
            ) from None
        except psycopg2.OperationalError as error:
            message = without_password(error, url)
            if time.monotonic() > deadline or is_refusal(message):
                raise PostgresUnavailable(
                    f"no session with Postgres, which keeps the lake's locks: {message}. See `postgres` in the "
                    "cluster's settings; the password is in PGPASSWORD or the file that PGPASSFILE names"
                ) from None
            time.sleep(0.5)


def is_refusal(message: str) -> bool:
    """Return whether Postgres answered that it will not serve this user or database; waiting does not help then."""
    passing = ("starting up", "shutting down", "recovery", "too many clients", "connection slots")
    return "no password supplied" in message or ("FATAL" in message and not any(text in message for text in passing))


def without_password(error: Exception, url: str) -> str:
    """Return the message of an error on one line, without the URL's password."""
    text = " ".join(str(error).split())
    passwords = {os.environ.get("PGPASSWORD"), psycopg2.extensions.parse_dsn(url).get("password")}
    for password in filter(None, passwords):
        text = text.replace(password, "***")
    return text
