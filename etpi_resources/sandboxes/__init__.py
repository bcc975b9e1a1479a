"""The Sandbox protocol: where model-written commands run.

Belongs here: the values that cross the boundary. Does not belong here: any sandbox, each a module of this package.
There is no sandbox on the bare host and no fallback to one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, runtime_checkable


class SandboxUnavailable(RuntimeError):
    """No sandbox can be started here; the message says what to install or start."""


class EnvironmentUnavailable(RuntimeError):
    """One task's environment cannot be had (its image, its checkout); other tasks' may. The message says what to do."""


@dataclass(frozen=True)
class Limits:
    """What a sandbox may use. Seconds, bytes and counts.

    file_bytes bounds a file, and what each writable place holds in all. cores is what all commands together may use
    where a control group can bound it (docker).
    """

    command_seconds: float = 20.0
    memory_bytes: int = 512 * 1024**2
    processes: int = 64
    file_bytes: int = 64 * 1024**2
    output_bytes: int = 16 * 1024
    cores: float = 2.0


@dataclass(frozen=True)
class Environment:
    """What a task's commands need beside its own files: an image for docker, or a checkout for bubblewrap.

    Attributes:
        workdir: the workspace's absolute path inside.
        image: the name of an image whose `workdir` is what the workspace starts as.
        build: a folder with a Dockerfile that `image` is built from where it is not there yet; None: it is pulled.
        checkout: a folder whose tree is copied into the workspace.
        tools: folders that are shown read-only at their own paths; the `bin` of each comes first on PATH.
        places: further absolute paths that are writable, empty and of bounded size.
        unread: names of folders that hold no work of an agent's; `read_files` leaves them out at any depth.
    """

    workdir: str = "/workspace"
    image: str | None = None
    build: Path | None = None
    checkout: Path | None = None
    tools: tuple[Path, ...] = ()
    places: tuple[str, ...] = ()
    unread: tuple[str, ...] = (".git", ".venv", "node_modules", "__pycache__")


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
        """Every regular UTF-8 file of the workspace by relative path, links not followed, within the size limits; not
        what `Environment.unread` names."""
        ...


class SandboxFactory(Protocol):
    """Makes sandboxes of one kind; raises SandboxUnavailable with the remedy where the kind cannot work here."""

    name: str

    def create(
        self, files: Mapping[str, str], limits: Limits = Limits(), environment: Environment | None = None
    ) -> Sandbox:
        """A sandbox whose workspace holds `files`, over what the environment puts there; nothing runs until it is
        entered. EnvironmentUnavailable, when entered, where the environment cannot be had in this kind."""
        ...


class HostFactory(SandboxFactory, Protocol):
    """A factory whose sandboxes run on this machine, or on its container engine."""

    def check(self) -> None:
        """Raise SandboxUnavailable, with the cause and remedies, where no sandbox of this kind can start."""
        ...
