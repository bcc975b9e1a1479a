"""Dagster's storage on a cluster: dagster-postgres' own, which goes on after Postgres was restarted.

dagster-postgres keeps connections of the web page open and uses them unexamined, so after a restart of Postgres the
page's next requests fail (HTTP 500), and a launch that fails between two of its statements leaves a run NOT_STARTED.
Its other processes wait some seconds for Postgres, and then end with a stack trace. Here every kept connection is tried
before it is used, processes wait as long as the lake's locks do, and whoever waits too long gets one message.

The names `_engine` and `_connect` are dagster-postgres' own, whose version is pinned.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import sqlalchemy
from dagster_postgres import (
    DagsterPostgresStorage,
    PostgresEventLogStorage,
    PostgresRunStorage,
    PostgresScheduleStorage,
)
from dagster_postgres.utils import create_pg_engine, pg_url_from_config, set_pg_statement_timeout
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from etpi_cluster.postgres_locks import START_SECONDS, PostgresUnavailable, is_refusal, without_password

USER_SECONDS = 5.0
"""Time that a process with a waiting user (a command, the web page) waits for Postgres."""
_POLL_SECONDS = 0.5


class _Patient:
    """Additions of a cluster's three storages to those of dagster-postgres."""

    _engine: sqlalchemy.Engine
    postgres_url: str
    patience = START_SECONDS
    """Seconds to wait for Postgres before a statement."""

    def optimize_for_webserver(self, statement_timeout: int, pool_recycle: int, max_overflow: int) -> None:
        """Keep connections open, as dagster-postgres does, and try each before it is used again."""
        self.patience = USER_SECONDS
        self._engine = create_pg_engine(
            self.postgres_url, isolation_level="AUTOCOMMIT", pool_size=1, pool_recycle=pool_recycle,
            max_overflow=max_overflow, pool_pre_ping=True,
        )  # fmt: skip
        event.listen(
            self._engine, "connect", lambda connection, _: set_pg_statement_timeout(connection, statement_timeout)
        )

    def connect(self, run_id: str | None = None) -> Any:
        return _connection(self._engine, self.patience)

    def _connect(self) -> Any:
        return _connection(self._engine, self.patience)


class _Runs(_Patient, PostgresRunStorage):
    pass


class _Events(_Patient, PostgresEventLogStorage):
    pass


class _Schedules(_Patient, PostgresScheduleStorage):
    pass


class NodeStorage(DagsterPostgresStorage):
    """Runs, events and schedules in the Postgres of `cluster.toml`; `dagster.yaml` names this class and the URL.

    Raises:
        PostgresUnavailable: Postgres does not answer, or refuses the session.
    """

    def __init__(self, postgres_url: str, inst_data: Any = None) -> None:
        engine = create_pg_engine(postgres_url, poolclass=NullPool)
        patience = START_SECONDS if _is_ray_job() else USER_SECONDS
        with _connection(engine, patience):
            pass
        super(DagsterPostgresStorage, self).__init__()  # its own would open three storages of the other kind
        self.postgres_url, self._inst_data = postgres_url, inst_data
        self._run_storage = _Runs(postgres_url)
        self._event_log_storage = _Events(postgres_url)
        self._schedule_storage = _Schedules(postgres_url)

    @classmethod
    def from_config_value(cls, inst_data: Any, config_value: Any) -> Self:
        return cls(pg_url_from_config(config_value), inst_data)


def _is_ray_job() -> bool:
    """Return whether this process is a run or a step, for which nobody waits at a terminal."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


@contextmanager
def _connection(engine: sqlalchemy.Engine, patience: float) -> Iterator[sqlalchemy.Connection]:
    """Open a connection, waiting while Postgres restarts.

    Raises:
        PostgresUnavailable: it does not answer for `patience` seconds, refuses, or ended in mid-statement.
    """
    with _opened(engine, patience) as connection:
        try:
            yield connection
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            raise PostgresUnavailable(
                "Postgres, which keeps Dagster's runs and events, ended in the middle of a statement: "
                f"{_reason(error, engine)}. Nothing published is lost; launch the run again"
            ) from None


def _opened(engine: sqlalchemy.Engine, patience: float) -> sqlalchemy.Connection:
    deadline = time.monotonic() + patience
    while True:
        try:
            return engine.connect()
        except OperationalError as error:
            reason = _reason(error, engine)
            if time.monotonic() > deadline or is_refusal(reason):
                raise PostgresUnavailable(
                    f"Postgres, which keeps Dagster's runs and events, cannot be opened: {reason}. Is it running "
                    "(`postgres` in cluster.toml), and does PGPASSFILE name a file with the password, or PGPASSWORD "
                    "hold it?"
                ) from None
            time.sleep(_POLL_SECONDS)


def _reason(error: DBAPIError, engine: sqlalchemy.Engine) -> str:
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    return without_password(error.orig or error, url).rstrip(".")
