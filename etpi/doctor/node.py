"""Examine the machine that this runs on. Nothing here judges; `verdict` does."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import time
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, Field

from etpi.doctor.listeners import on_all_interfaces
from etpi_resources.cluster.code import code_hash
from etpi_resources.cluster.settings import Cluster
from etpi_resources.process.locks import Locks, lake_locks, machine_locks
from etpi_resources.sandboxes import SandboxUnavailable
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

FOLDER = ".doctor"
"""Folder in the lake for the files of an examination, which removes it."""
_DEVICES = re.compile(r"nvidia[0-9]+|renderD[0-9]+")


class Postgres(BaseModel):
    """What a node reaches at the URL of `cluster.toml`. `server` tells one server from another."""

    version: int
    server: str
    superuser: bool


class NodeReport(BaseModel):
    """What one machine reports of itself.

    Attributes:
        offers: what it offers to Ray; empty on one machine.
        code: hash of etpi's code there (`code_hash`).
        lake_error: why the lake's folder cannot be read and written there; None if it can.
        lake_kind: type and options of the file system of the lake.
        sees: names of the other nodes' files in the lake that it reads.
        sandbox_error: why no sandbox starts there; None if one does.
        accelerators: names of device files of accelerators.
        clock_offset: seconds that its clock is ahead of the asking machine's; `clock_within` is the error of that.
        postgres_error: why Postgres cannot be used there; None if it can.
        local_error: why the folder for a node's own files cannot be written; None if it can.
        free_gb: free space of the lake and of the node's own folder, GB.
        listens: ports that are open on all interfaces of the machine, by program.
    """

    name: str
    address: str = ""
    offers: dict[str, float] = Field(default_factory=dict)
    python: str = ""
    ray: str | None = None
    code: str = ""
    lake_error: str | None = None
    lake_kind: str = ""
    sees: list[str] = Field(default_factory=list)
    sandbox_error: str | None = None
    accelerators: list[str] = Field(default_factory=list)
    clock_offset: float = 0.0
    clock_within: float = 0.0
    postgres: Postgres | None = None
    postgres_error: str | None = None
    local_error: str | None = None
    free_gb: dict[str, float] = Field(default_factory=dict)
    listens: dict[str, list[int]] = Field(default_factory=dict)


class Examiner:
    """Examine this machine; on a cluster one is an actor on each node.

    Args:
        settings: of the cluster; None on one machine.
        lake: the lake's folder.
        name: of this node, the same in every report.
        offers: what the node offers to Ray.
        token: names the files of this examination.
    """

    def __init__(self, settings: Cluster | None, lake: Path, name: str, offers: dict[str, float], token: str) -> None:
        self.settings, self.lake, self.name, self.offers = settings, lake, name, offers
        self._folder = lake / FOLDER / token
        self._held: Any = None

    def report(self) -> dict[str, Any]:
        """Return a NodeReport as plain values, so that a node with other code can be read too."""
        postgres, postgres_error = _postgres(self.settings)
        local = self.settings.local if self.settings else None
        places = {"lake": self.lake, **({"local": local} if local else {})}
        return NodeReport(
            name=self.name,
            offers=self.offers,
            python=platform.python_version(),
            ray=_version("ray"),
            code=code_hash(),
            lake_error=self._lake_error(),
            lake_kind=file_system(self.lake),
            sandbox_error=_sandbox_error(),
            accelerators=sorted(path.name for path in _device_files()),
            postgres=postgres,
            postgres_error=postgres_error,
            local_error=_not_writable(local) if local else None,
            free_gb={name: round(free, 1) for name, place in places.items() if (free := _free_gb(place)) is not None},
            listens=on_all_interfaces(_port(self.settings)) if self.settings else {},
        ).model_dump()

    def clock(self) -> float:
        """Return this machine's time, seconds since 1970."""
        return time.time()

    def seen(self) -> list[str]:
        """Return the names of the nodes whose files in the lake this node reads."""
        try:
            return sorted(path.stem for path in self._folder.glob("*.node") if path.read_text() == path.stem)
        except OSError:
            return []

    def hold(self, kind: str) -> str | None:
        """Take the lock of a kind and keep it; return why that failed."""
        self._held = self._locks(kind).hold(self._lock_file(kind), wait=False, what="the lock of etpi doctor")
        try:
            self._held.__enter__()
        except Exception as error:  # every reason is one that a person must read
            self._held = None
            return f"{type(error).__name__}: {error}"
        return None

    def can_take(self, kind: str) -> bool | str:
        """Return whether the lock can be taken now; text: why not even that can be said."""
        try:
            held = self._locks(kind).try_lock(self._lock_file(kind), "the lock of etpi doctor", False)
        except Exception as error:  # as in `hold`
            return f"{type(error).__name__}: {error}"
        if held is None:
            return False
        held.release()
        return True

    def release(self) -> None:
        """Release the lock that `hold` took."""
        if self._held is not None:
            self._held.__exit__(None, None, None)
            self._held = None

    def tidy(self) -> None:
        """Remove the files of this examination."""
        shutil.rmtree(self._folder, ignore_errors=True)
        for path in (self._folder.parent,):
            try:
                path.rmdir()
            except OSError:
                return

    def _lake_error(self) -> str | None:
        if error := _not_writable(self.lake):
            return error
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            named = self._folder / f"{self.name}.node"
            being_written = named.with_suffix(".new")
            being_written.write_text(self.name)
            being_written.rename(named)
        except OSError as error:
            return f"{error.strerror}: {error.filename}"
        return None

    def _locks(self, kind: str) -> Locks:
        return lake_locks() if kind == "lake" else machine_locks()

    def _lock_file(self, kind: str) -> Path:
        return self._folder / f"{kind}.lock"


def file_system(path: Path) -> str:
    """Return type and options of the file system of `path`, such as "nfs4 (rw,local_lock=none)"."""
    description, best = "", -1
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point, options = before.split()[4], before.split()[5]
        point = point.encode().decode("unicode_escape")
        if path.is_relative_to(point) and len(point) >= best:
            kind, _, super_options = after.split(maxsplit=2)
            best, description = len(point), f"{kind} ({options},{super_options.split()[-1]})"
    return description


def _not_writable(folder: Path) -> str | None:
    """Write, read and remove a file in a folder; return why that failed."""
    probe = folder / f".doctor-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(b"doctor")
            file.flush()
            os.fsync(file.fileno())
        content = probe.read_bytes()
        probe.unlink()
    except OSError as error:
        return f"{error.strerror}: {error.filename}"
    return None if content == b"doctor" else f"a file written to {folder} reads back as {content!r}"


def _sandbox_error() -> str | None:
    try:
        BubblewrapFactory().check()
    except SandboxUnavailable as error:
        return str(error)
    return None


def _device_files() -> list[Path]:
    """Return the files of NVIDIA's devices, or those of rendering where AMD's compute device exists."""
    amd = Path("/dev/kfd").exists()
    places = [*Path("/dev").glob("nvidia[0-9]*"), *(Path("/dev/dri").glob("renderD*") if amd else ())]
    return [path for path in places if _DEVICES.fullmatch(path.name)]


def _postgres(settings: Cluster | None) -> tuple[Postgres | None, str | None]:
    if settings is None:
        return None, None
    try:
        import psycopg2
    except ImportError as error:
        return None, f"{error}; pip install 'etpi[cluster]'"
    try:
        connection = psycopg2.connect(settings.postgres.replace("postgresql+psycopg2://", "postgresql://", 1),
                                      connect_timeout=10)  # fmt: skip
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


def _port(settings: Cluster) -> int:
    return urlsplit(settings.postgres).port or 5432


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _free_gb(folder: Path) -> float | None:
    try:
        return shutil.disk_usage(folder).free / 1e9
    except OSError:
        return None
