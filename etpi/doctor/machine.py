"""Examine the machine that this runs on. Nothing here judges; `findings` does."""

from __future__ import annotations

import os
import re
import shutil
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from etpi_resources.process.locks import Locks, lake_locks, machine_locks
from etpi_resources.sandboxes import SandboxUnavailable
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

FOLDER = ".doctor"
"""Folder in the lake for the files of an examination, which removes it."""
_DEVICES = re.compile(r"nvidia[0-9]+|renderD[0-9]+")


class MachineReport(BaseModel):
    """Report of one machine.

    Attributes:
        lake_error: why the lake's folder cannot be read and written there; None if it can.
        lake_kind: type and options of the file system of the lake.
        sandbox_error: why no sandbox starts there; None if one does.
        accelerators: names of device files of accelerators.
        free_gb: free space of the lake and of other folders, GB.
        unguarded: processes that serve Dagster's page to every website that the user's browser opens.
    """

    name: str
    lake_error: str | None = None
    lake_kind: str = ""
    sandbox_error: str | None = None
    accelerators: list[str] = Field(default_factory=list)
    free_gb: dict[str, float] = Field(default_factory=dict)
    unguarded: list[str] = Field(default_factory=list)


class Examiner:
    """Examine this machine.

    Args:
        lake: the lake's folder.
        name: of this machine.
        token: names the files of this examination.
    """

    def __init__(self, lake: Path, name: str, token: str) -> None:
        self.lake, self.name = lake, name
        self.folder = lake / FOLDER / token
        self._held: Any = None

    def machine(self) -> MachineReport:
        return MachineReport(
            name=self.name,
            lake_error=not_writable(self.lake),
            lake_kind=file_system(self.lake),
            sandbox_error=_sandbox_error(),
            accelerators=_accelerators(),
            free_gb=free_gb({"lake": self.lake}),
            unguarded=unguarded_pages(),
        )

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
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()

    def _locks(self, kind: str) -> Locks:
        return lake_locks() if kind == "lake" else machine_locks()

    def _lock_file(self, kind: str) -> Path:
        return self.folder / f"{kind}.lock"


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


def not_writable(folder: Path) -> str | None:
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


def unguarded_pages(proc: Path = Path("/proc")) -> list[str]:
    """Return "PROGRAM (process N)" for each process that serves Dagster's page, but for `etpi ui`."""
    result = []
    for folder in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            # `python -m dagster_webserver`, or the console script with or without its interpreter
            if {"dagster_webserver", "dagster-webserver"} & {Path(word).name for word in words[:3]}:
                result.append(f"dagster-webserver (process {folder.name})")
    return result


def _sandbox_error() -> str | None:
    try:
        BubblewrapFactory().check()
    except SandboxUnavailable as error:
        return str(error)
    return None


def _accelerators() -> list[str]:
    """Return the names of NVIDIA's device files, and of those of rendering where AMD's compute device exists."""
    amd = Path("/dev/kfd").exists()
    places = [*Path("/dev").glob("nvidia[0-9]*"), *(Path("/dev/dri").glob("renderD*") if amd else ())]
    return sorted(path.name for path in places if _DEVICES.fullmatch(path.name))


def free_gb(folders: Mapping[str, Path]) -> dict[str, float]:
    """Return the free space of those folders that exist, GB."""
    result = {}
    for name, folder in folders.items():
        with suppress(OSError):
            result[name] = round(shutil.disk_usage(folder).free / 1e9, 1)
    return result
