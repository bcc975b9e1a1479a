"""Control groups that bound the memory of a sandbox, where this process may create them.

A group counts memory that no process is charged for: buffers of sockets, unmapped shared memory, the kernel's own.
Without a group, the guest watches processes and the system call filter refuses shared anonymous memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from functools import cache
from pathlib import Path
from typing import Self

GROUP_VARIABLE = "ETPI_CGROUP"
"""Environment variable that names a control group in which this user may create groups."""

_ROOT = Path("/sys/fs/cgroup")
_NAME = "etpi"
_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""The files of versions 2 and 1."""
_SOCKETS = "memory.kmem.tcp.limit_in_bytes"
"""Version 1 limits the buffers of TCP and UDP sockets apart; version 2 counts them with all memory."""
_REMOVE_SECONDS = 2.0
_CHARGED_AT_ONCE = 1 << 20
"""Bytes by which a group without room can be below its limit."""


class MemoryGroup:
    """A control group with a memory limit. Close it when its processes have ended.

    Attributes:
        statistics: the file in which the kernel counts its memory by kind.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.statistics = folder / "memory.stat"

    @classmethod
    def create(cls, limit_bytes: int) -> Self | None:
        """Create a group; None if this process may not, or the machine has none.

        Raises:
            OSError: the group that ETPI_CGROUP names cannot be used.
        """
        if (parent := _parent(os.environ.get(GROUP_VARIABLE))) is None:
            return None
        folder = _new_folder(parent)
        for name in (*_LIMITS, _SOCKETS):
            if (folder / name).exists():
                (folder / name).write_text(str(limit_bytes))
        return cls(folder)

    @classmethod
    def of_container(cls, container: str, pid: int) -> Self | None:
        """Return the group in which an engine of this machine put a container; None if it cannot be read here.

        That group has the limit, and its process can be in one below it (podman's `libpod-ID.scope/container`).
        """
        for line in _text(Path(f"/proc/{pid}/cgroup")).splitlines():
            _, controllers, path = line.split(":", 2)
            if (match := re.match(rf"/(.*{container}[^/]*)", path)) and controllers in ("", "memory"):
                folder = _ROOT / ("memory" if controllers else "") / match[1]
                if (folder / "memory.stat").exists():
                    return cls(folder)
        return None

    def add(self, pid: int) -> None:
        """Move a process into the group; its later children are in it too."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        """Return how many processes the kernel has ended because the group reached its limit, not the machine its own;
        0 if the group is removed."""
        if reached := self._count("memory.events", "oom "):  # version 2
            return min(reached, self._count("memory.events", "oom_kill "))
        peak = self._count("memory.memsw.max_usage_in_bytes") or self._count("memory.max_usage_in_bytes")
        is_reached = peak + _CHARGED_AT_ONCE >= self._count("memory.limit_in_bytes")
        return self._count("memory.oom_control", "oom_kill ") if is_reached else 0

    def _count(self, file: str, name: str = "") -> int:
        """Return a number of a file of version 1 or 2; 0 if the group does not have it."""
        count = re.search(rf"^{name}(\d+)", _text(self._folder / file), re.MULTILINE)
        return int(count[1]) if count else 0

    def close(self) -> None:
        """Remove the group; its processes must have ended, which the kernel may notice a moment later."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        while True:
            try:
                self._folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    return  # `remove_abandoned` of a later process removes it
                time.sleep(0.01)


@cache
def _parent(named: str | None) -> Path | None:
    """Return the group in which to create groups; removes those that dead processes left there."""
    candidates = [Path(named)] if named else [*_version_1(), *_version_2()]
    for folder in candidates:
        try:
            _new_folder(folder).rmdir()
        except OSError as error:
            if named:
                raise OSError(
                    f"{GROUP_VARIABLE}={named} cannot be used: {error}. It has to be a control group with the memory "
                    "controller, in which this user may create groups (docs/sandboxes.md)"
                ) from error
            continue
        _remove_abandoned(folder)
        return folder
    return None


def _version_1() -> list[Path]:
    """Return this process's group of the memory controller, if the machine has version 1."""
    match = re.search(r"^\d+:(?:[\w,]+,)?memory(?:,[\w,]+)?:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    return [_ROOT / "memory" / match[1].lstrip("/"), _ROOT / "memory"] if match else []


def _version_2() -> list[Path]:
    """Return the group in which root creates groups, if the machine has version 2; other users name one."""
    if os.geteuid() != 0 or "memory" not in _text(_ROOT / "cgroup.subtree_control").split():
        return []
    folder = _ROOT / _NAME
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.subtree_control").write_text("+memory")
    return [folder]


def _new_folder(parent: Path) -> Path:
    """Create a group that can have a memory limit; raises OSError where that fails."""
    folder = parent / f"{_NAME}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    folder.mkdir()
    if not any((folder / name).exists() for name in _LIMITS):
        folder.rmdir()
        raise OSError("it has no memory controller")
    return folder


def _remove_abandoned(parent: Path) -> None:
    """Remove the groups of processes that are gone."""
    for folder in parent.glob(f"{_NAME}-*-*"):
        if not Path("/proc", folder.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
