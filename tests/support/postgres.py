"""A real Postgres of its own: a cluster in a temporary folder, on a free port of the loopback address.

`tests/conftest.py` has the fixture `postgres_server`, one for all tests; take `new_database()` of it. The
fixture `cluster_settings` names it in ETPI_CLUSTER.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.container_engine import die_with_parent
from tests.support.waiting import until

PASSWORD = "s3cret-of-the-tests"
"""The superuser's password, which no message may contain."""

_starts = ThreadPoolExecutor(1)
"""Postgres ends with the thread that started it; tests restart it in threads that end before them."""


def binaries() -> Path | None:
    """Return the folder of initdb and postgres; None where Postgres is not installed."""
    folders = [path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True)]
    found = shutil.which("postgres")
    return folders[0] if folders else Path(found).parent if found else None


def missing() -> str | None:
    """Return why no Postgres can be started here; None if one can."""
    try:
        import psycopg2  # noqa: F401 - part of etpi-cluster
    except ImportError:
        return "psycopg2 is not installed: pip install etpi-cluster"
    if binaries() is None:
        return "Postgres is not installed: apt-get install postgresql"
    if os.geteuid() == 0 and _user() is None:
        return "Postgres does not run as root, and there is no user `postgres` or `nobody`"
    return None


def _user() -> str | None:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return None


class PostgresServer:
    """A running Postgres. `stop` and `start` restart it on the same port, with its data."""

    def __init__(self) -> None:
        bin = binaries()
        assert bin is not None
        self._bin, self._user = bin, _user() if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="etpi-pg-"))
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        if self._user:
            shutil.chown(self._folder, self._user)
        password = self._folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        self._run(
            "initdb", "-D", str(self._folder / "data"), "-U", "etpi", "-A", "scram-sha-256", "-E", "UTF8",
            "--locale=C", "--no-sync", f"--pwfile={password}",
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        settings = {
            "listen_addresses": "127.0.0.1", "port": str(self.port), "unix_socket_directories": "", "fsync": "off",
            "shared_buffers": "16MB", "max_connections": "60",
        }  # fmt: skip
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self._process = _starts.submit(
            subprocess.Popen,
            [self._bin / "postgres", "-D", str(self._folder / "data"), *options],
            stdout=subprocess.DEVNULL, stderr=(self._folder / "log").open("ab"), user=self._user, cwd="/",
            preexec_fn=die_with_parent,
        ).result()  # fmt: skip
        until(lambda: self.ask("SELECT 1"), 30, ignored=Exception)

    def stop(self) -> None:
        """Stop it as an administrator does who restarts it: sessions are ended."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=30)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def url(self, database: str = "postgres") -> str:
        """Return a URL without the password, which `environment` has."""
        return f"postgresql://etpi@127.0.0.1:{self.port}/{database}"

    @property
    def environment(self) -> dict[str, str]:
        """What the environment of a process needs besides the URL."""
        return {"PGPASSWORD": PASSWORD}

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"test_{secrets.token_hex(6)}"
        self.ask(f"CREATE DATABASE {name}")
        return self.url(name)

    def ask(self, sql: str, database: str = "postgres", values: Mapping[str, Any] | None = None) -> list[Any]:
        """Run one statement and return its rows."""
        import psycopg2

        connection = psycopg2.connect(self.url(database), password=PASSWORD, connect_timeout=5)
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(sql, values)
                return cursor.fetchall() if cursor.description else []
        finally:
            connection.close()

    def end_sessions(self, of: str = "etpi ") -> int:
        """End the sessions whose application name starts so, as an administrator does; return their number."""
        sql = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE starts_with(application_name, %(of)s)"
        return len(self.ask(sql, values={"of": of}))

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._bin / program, *arguments], user=self._user, cwd="/", check=True, capture_output=True, text=True
        )


def write_settings(folder: Path, url: str, lake: Path) -> Path:
    """Write a `cluster.toml` that names a Postgres and a lake, for ETPI_CLUSTER; nothing answers as Ray."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cluster.toml"
    lines = {"lake": lake, "postgres": url, "ray": "127.0.0.1:1", "jobs": "http://127.0.0.1:1", "local": folder}
    path.write_text("".join(f'{name} = "{value}"\n' for name, value in lines.items()))
    return path
