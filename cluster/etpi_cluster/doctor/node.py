"""Examine a node of the cluster: the machine, its programs and its connections. `verdict` judges the report."""

from __future__ import annotations

import platform
import re
import time
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import psycopg2
from pydantic import BaseModel, Field

from etpi.doctor.machine import Examiner, MachineReport, free_gb, not_writable
from etpi_cluster.code import code_hash
from etpi_cluster.doctor.listeners import on_all_interfaces
from etpi_cluster.settings import Cluster


class Postgres(BaseModel):
    """The server that a node reaches at the URL of `cluster.toml`. `server` tells one server from another."""

    version: int
    server: str
    superuser: bool


class NodeReport(MachineReport):
    """Report of one node.

    Attributes:
        offers: what it offers to Ray.
        code: hash of etpi's code there (`code_hash`).
        sees: names of the other nodes' files in the lake that it reads.
        clock_offset: seconds that its clock is ahead of the asking machine's; `clock_within` is the error of that.
        postgres_error: why Postgres cannot be used there; None if it can.
        local_error: why the folder for a node's own files cannot be written; None if it can.
        listens: ports that are open on all interfaces of the machine, by program.
    """

    offers: dict[str, float] = Field(default_factory=dict)
    python: str = ""
    ray: str | None = None
    code: str = ""
    sees: list[str] = Field(default_factory=list)
    clock_offset: float = 0.0
    clock_within: float = 0.0
    postgres: Postgres | None = None
    postgres_error: str | None = None
    local_error: str | None = None
    listens: dict[str, list[int]] = Field(default_factory=dict)


class NodeExaminer(Examiner):
    """Examine a node, as an actor on it.

    Args:
        name: of this node, the same in every report.
        offers: what the node offers to Ray.
        token: names the files of this examination.
    """

    def __init__(self, settings: Cluster, name: str, offers: dict[str, float], token: str) -> None:
        super().__init__(settings.lake, name, token)
        self.settings, self.offers = settings, offers

    def report(self) -> dict[str, Any]:
        """Return a NodeReport as plain values, so that a node with other code can be read too."""
        machine, local = self.machine(), self.settings.local
        postgres, postgres_error = _postgres(self.settings)
        machine.lake_error = machine.lake_error or self._named_file_error()
        machine.free_gb |= free_gb({"local": local})
        return NodeReport(
            **machine.model_dump(),
            offers=self.offers,
            python=platform.python_version(),
            ray=version("ray"),
            code=code_hash(),
            postgres=postgres,
            postgres_error=postgres_error,
            local_error=not_writable(local),
            listens=on_all_interfaces(urlsplit(self.settings.postgres).port or 5432),
        ).model_dump()

    def clock(self) -> float:
        """Return this machine's time, seconds since 1970."""
        return time.time()

    def seen(self) -> list[str]:
        """Return the names of the nodes whose files in the lake this node reads."""
        try:
            return sorted(path.stem for path in self.folder.glob("*.node") if path.read_text() == path.stem)
        except OSError:
            return []

    def _named_file_error(self) -> str | None:
        """Write the file that the other nodes read; return why that failed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            named = self.folder / f"{self.name}.node"
            being_written = named.with_suffix(".new")
            being_written.write_text(self.name)
            being_written.rename(named)
        except OSError as error:
            return f"{error.strerror}: {error.filename}"
        return None


def _postgres(settings: Cluster) -> tuple[Postgres | None, str | None]:
    url = settings.postgres.replace("postgresql+psycopg2://", "postgresql://", 1)
    try:
        connection = psycopg2.connect(url, connect_timeout=10)
        try:
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT current_setting('server_version_num')::int, pg_postmaster_start_time()::text "
                    "|| current_database(), current_setting('is_superuser') = 'on'"
                )
                number, server, superuser = cursor.fetchall()[0]
        finally:
            connection.close()
    except psycopg2.Error as error:
        return None, re.sub(r"(://[^:@/]*):[^@/]*@", r"\1:…@", str(error)).strip() or type(error).__name__
    return Postgres(version=number, server=server, superuser=superuser), None
