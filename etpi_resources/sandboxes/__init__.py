"""The Sandbox protocol: where commands written by a model run.

Each sandbox is a module of this package. There is none on the bare host, and no fallback to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from etpi_resources.errors import ExpectedError


class SandboxUnavailable(ExpectedError, RuntimeError):
    """No sandbox can start on this machine; the message says what to install or start."""


class SandboxStopped(SandboxUnavailable):
    """One sandbox was killed from outside, so its rollout has no result; others can start."""


REPLY = "(reply of the host)"
"""The last line of output of a command that asks for one of `Environment.replies`."""


class EnvironmentUnavailable(RuntimeError):
    """One task's image or checkout is not available; other tasks are not affected. The message says what to do."""


@dataclass(frozen=True)
class Limits:
    """The limits of a sandbox, in seconds, bytes and counts.

    `file_bytes` limits each file and the total of each writable place. `cores` limits all commands together, in docker
    only, through a control group. `address_bytes` limits the addresses of each process, in bubblewrap only; None:
    `memory_bytes`. Runtimes such as Node reserve far more addresses than they use memory.
    """

    command_seconds: float = 20.0
    memory_bytes: int = 512 * 1024**2
    processes: int = 64
    file_bytes: int = 64 * 1024**2
    output_bytes: int = 16 * 1024
    cores: float = 2.0
    address_bytes: int | None = None


@dataclass(frozen=True)
class Environment:
    """The environment that a task's commands need besides its files: an image (docker) or a checkout (bubblewrap).

    Attributes:
        workdir: the workspace's absolute path inside the sandbox.
        image: the name of an image; its `workdir` is the initial workspace.
        build: a folder with a Dockerfile to build the image from if it does not exist; None: the image is pulled.
        checkout: a folder whose tree is copied into the workspace.
        tools: folders mounted read-only at their own paths, in bubblewrap with the `bin` of each first on PATH; in
            docker only beside `downloads`, and not if commands install software.
        installs: whether commands install software: tools are then copies of the sandbox's own, and root in a task's
            image keeps the capabilities that package managers need.
        downloads: the folder of a `downloads.proxy`, the only way out of the sandbox, shown at its SHOWN_AT.
        places: further absolute paths that are writable, empty and of bounded size.
        unread: names of folders that `read_files` skips at any depth, because they contain no work of an agent.
        replies: lines that commands get from the host, in order: a command whose output ends in the line REPLY gets
            the next one in its place. No program in the sandbox ever sees them.
    """

    workdir: str = "/workspace"
    image: str | None = None
    build: Path | None = None
    checkout: Path | None = None
    tools: tuple[Path, ...] = ()
    installs: bool = False
    downloads: Path | None = None
    places: tuple[str, ...] = ()
    unread: tuple[str, ...] = (".git", ".venv", "node_modules", "__pycache__")
    replies: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandResult:
    """The result of one command.

    Attributes:
        output: stdout and stderr interleaved as text (undecodable bytes replaced), cut at `Limits.output_bytes` with a
            note.
        exit_code: the command's own; 124 if it exceeded the time limit, 137 if another limit or the sandbox ended it.
        seconds: wall time.
    """

    output: str
    exit_code: int
    seconds: float
    timed_out: bool = False
    truncated: bool = False


@runtime_checkable
class Sandbox(Protocol):
    """One isolated workspace without network, host files or host environment; a context manager.

    A rollout starts it once. Every command runs in a new shell in the workspace.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def run(self, command: str, *, timeout: float | None = None) -> CommandResult:
        """Run one bash command; never raises, whatever the command does."""
        ...

    def write_files(self, files: Mapping[str, str]) -> None:
        """Write text files, by path relative to the workspace."""
        ...

    def read_files(self) -> dict[str, str]:
        """Return every regular UTF-8 file of the workspace by relative path, within the size limits. Links are not
        followed, and folders that `Environment.unread` names are skipped."""
        ...


class SandboxFactory(Protocol):
    """Creates sandboxes of one kind."""

    name: str

    def create(
        self, files: Mapping[str, str], limits: Limits = Limits(), environment: Environment | None = None
    ) -> Sandbox:
        """Create a sandbox with `files` written over the environment's workspace; it starts when it is entered.

        Entering raises SandboxUnavailable, with the remedy, if this kind does not work on this machine, and
        EnvironmentUnavailable if this kind cannot provide the environment.
        """
        ...


class HostFactory(SandboxFactory, Protocol):
    """A factory whose sandboxes run on this machine or its container engine."""

    def check(self) -> None:
        """Raise SandboxUnavailable, with the cause and remedies, if no sandbox of this kind can start."""
        ...
