"""The Sandbox protocol: where model-written commands run.

Belongs here: the values that cross the boundary. Does not belong here: any sandbox, each a module of this package.
There is no sandbox on the bare host and no fallback to one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable


class SandboxUnavailable(RuntimeError):
    """No sandbox can be started here; the message says what to install or start."""


@dataclass(frozen=True)
class Limits:
    """What a sandbox may use. Seconds, bytes and counts."""

    command_seconds: float = 20.0
    memory_bytes: int = 512 * 1024**2
    processes: int = 64
    file_bytes: int = 64 * 1024**2
    output_bytes: int = 16 * 1024


@dataclass(frozen=True)
class CommandResult:
    """One command's outcome: stdout and stderr interleaved as text (undecodable bytes replaced), cut at
    `Limits.output_bytes` with a note; the exit code (124 where the time limit ended it); wall seconds."""

    output: str
    exit_code: int
    seconds: float
    timed_out: bool = False
    truncated: bool = False


@runtime_checkable
class Sandbox(Protocol):
    """One isolated workspace: no network, no host files, no host environment. Used as a context manager; started once
    a rollout, and every command is a fresh shell inside it with the workspace as its directory."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def run(self, command: str, *, timeout: float | None = None) -> CommandResult:
        """Run one bash command; never raises for what the command does."""
        ...

    def write_files(self, files: Mapping[str, str]) -> None:
        """Write text files, by path relative to the workspace."""
        ...

    def read_files(self) -> dict[str, str]:
        """Every regular UTF-8 file of the workspace by relative path, links not followed, within the size limits."""
        ...


class SandboxFactory(Protocol):
    """Makes sandboxes of one kind; raises SandboxUnavailable with the remedy where the kind cannot work here."""

    name: str

    def create(self, files: Mapping[str, str], limits: Limits = Limits()) -> Sandbox:
        """A sandbox whose workspace holds `files`; nothing runs until it is entered."""
        ...
