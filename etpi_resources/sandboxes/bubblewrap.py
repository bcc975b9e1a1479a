"""The default sandbox: namespaces through bubblewrap, limits, and a guest that runs the commands.

The host is isolated from commands by: new namespaces for users, mounts, processes, network, IPC and host name; no
capabilities and no further user namespace; /usr and the loader's cache mounted read-only, and no other files of the
host; private /proc, /dev, /tmp and /workspace, the writable ones of bounded size; an empty environment; limits on
memory, processes, file size, open files and CPU time; a system call filter (`seccomp`); a wall clock. If root starts a
sandbox, it runs as an unprivileged user, because the process limit does not apply to root and root could read its own
processes' files in /proc.

The kernel limits the memory of each process. The guest limits the memory of all together: it checks every 50 ms and
ends the command. A control group (`memory_group`), where this user may create one, bounds what the kernel holds for the
sandbox. Without one, shared anonymous memory, for which no
process would be charged, is refused, and /dev/zero cannot be mapped.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Self

from etpi_resources.sandboxes import Environment, EnvironmentUnavailable, Limits, SandboxUnavailable, namespaces
from etpi_resources.sandboxes.downloads.proxy import SHOWN_AT
from etpi_resources.sandboxes.guest_connection import (
    END_SECONDS,
    GRACE_SECONDS,
    GUEST,
    GuestConnection,
    GuestUnreachable,
    guest_arguments,
    wait_until_ready,
)
from etpi_resources.sandboxes.memory_group import MemoryGroup
from etpi_resources.sandboxes.seccomp import filter_program

_USERS = (1 << 30, 1 << 31)
"""Users and groups of sandboxes that root starts: every sandbox has its own, since limits of the kernel that
count by user (inotify, pipes, keys) would otherwise be shared. Ids that own no files."""

_HIDDEN = (
    "acpi", "asound", "bootconfig", "cmdline", "config.gz", "interrupts", "keys", "latency_stats", "sched_debug",
    "scsi",
)  # fmt: skip
"""Entries of /proc that describe the host and that every user can read, as container engines hide them. The others of
their list can be read by root only."""

_MEMORY_FILE = "/run/memory.stat"
"""File in which the guest reads the control group's count; `guest.STATISTICS` names it too."""

_OVERHEAD = 64 * 1024**2
"""Bytes of memory for guest and kernel, in addition to the limits of commands and files."""

_COPY_SECONDS = 120.0
"""Time limit of copying a checkout into the workspace."""

_BOOT = "import marshal; exec(marshal.load(open(0, 'rb', closefd=False)))"
_COMPILE = (
    "import marshal, sys; "
    "marshal.dump(compile(sys.stdin.buffer.read(), 'guest', 'exec', optimize=2), sys.stdout.buffer)"
)
"""The guest's code arrives on its own stdin, so commands cannot read it in a file. The interpreter that runs the guest
compiles it once for all sandboxes."""

_NO_ZERO = ("--dev-bind", "/dev/full", "/dev/zero")
"""It reads as zeros too, and cannot be mapped: no process is charged for all of a shared mapping of /dev/zero."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_TOOLS = "/run/tools"
_CHECKOUT = "/run/checkout"
_ORIGINALS = "/run/originals"
_READABLE = (
    "Everybody must be able to read it and enter its parents (chmod -R a+rX): commands run as a user of their own."
)


class BubblewrapFactory:
    """Creates bubblewrap sandboxes. Thread-safe; it looks for the programs it needs when the first sandbox starts."""

    name = "bubblewrap"

    def __reduce__(self) -> tuple[type[BubblewrapFactory], tuple[()]]:
        """Pickle without the programs of this machine."""
        return BubblewrapFactory, ()

    def create(
        self,
        files: Mapping[str, str],
        limits: Limits = Limits(),  # noqa: B008
        environment: Environment | None = None,
    ) -> BubblewrapSandbox:
        """Create a sandbox with `files` (relative path -> text) written over the environment's checkout.

        Raises ValueError if a path is absolute or contains `..`; entering raises as `SandboxFactory.create` says.
        """
        return BubblewrapSandbox(self._command, files, limits, environment)

    def check(self) -> None:
        """Start and end one sandbox; raises SandboxUnavailable with the cause and remedies."""
        with self.create({}):
            pass

    @cached_property
    def _command(self) -> _Command:
        return _Command.here()


class _Command:
    """The parts of the command line that are the same for all sandboxes, and the compiled guest and filter."""

    def __init__(self, head: list[str], binds: list[str], python: str, machine: str, guest: bytes) -> None:
        self.head, self.binds, self.python, self.guest = head, binds, python, guest
        self.seccomp = {shared: filter_program(machine, shared_memory=shared) for shared in (True, False)}

    @classmethod
    def here(cls) -> _Command:
        """Build it for this machine. Raises SandboxUnavailable if a program is missing."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxUnavailable(namespaces.not_installed())
        head = [bwrap]
        if os.geteuid() == 0:
            setpriv = shutil.which("setpriv")
            if setpriv is None:
                raise SandboxUnavailable(
                    "setpriv is missing; root needs it to drop its privileges. Install util-linux."
                )
            head = [setpriv, "--reuid={user}", "--regid={user}", "--clear-groups", "--", bwrap]
        python, prefix = _interpreter()
        compiled = subprocess.run(
            [python, "-I", "-S", "-c", _COMPILE], input=GUEST.read_bytes(), capture_output=True, check=True, env={}
        )
        try:
            return cls(head, _system_binds(python, prefix), python, platform.machine(), compiled.stdout)
        except KeyError as error:
            raise SandboxUnavailable(f"{error.args[0]}; use another sandbox on this machine") from error

    def line(self, limits: Limits, environment: Environment, seccomp_fd: int, group: MemoryGroup | None) -> list[str]:
        """Return the command line of one sandbox; the filter is read from `seccomp_fd`."""
        disk = str(limits.file_bytes)
        variables = {
            "PATH": ":".join([*(f"{folder}/bin" for folder in environment.tools), _TOOLS, "/usr/bin", "/bin"]),
            "HOME": "/tmp",
            "USER": "agent",
            "LC_CTYPE": "C.UTF-8",  # LANG would make every program open a dozen more files, for the same settings
            "TERM": "dumb",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        workdir = environment.workdir
        shown = _originals(environment) if environment.installs else {str(path): path for path in environment.tools}
        mounts = [word for place, folder in shown.items() for word in ("--ro-bind", str(folder), place)]
        if environment.downloads is not None:
            mounts += ["--ro-bind", str(environment.downloads), SHOWN_AT]
        if environment.checkout is not None:
            mounts += ["--ro-bind", str(environment.checkout), _CHECKOUT]
        if group is not None:
            mounts += ["--ro-bind", str(group.statistics), _MEMORY_FILE]
        places = _places(environment)
        user = str(_unused_user())
        # fmt: off
        return [
            *(word.format(user=user) for word in self.head),
            "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000",
            "--cap-drop", "ALL", "--seccomp", str(seccomp_fd),
            "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox",
            "--clearenv", *(word for key, value in variables.items() for word in ("--setenv", key, value)),
            *self.binds,
            "--proc", "/proc", *_masks(),
            "--dev", "/dev", *(_NO_ZERO if group is None else ()),
            "--size", disk, "--tmpfs", "/dev/shm", "--remount-ro", "/dev",
            *(word for place in places for word in ("--size", disk, "--tmpfs", place)), *mounts, "--remount-ro", "/",
            "--chdir", workdir,
            self.python, "-I", "-S", "-c", _BOOT,
            *guest_arguments(
                limits, address=limits.address_bytes or limits.memory_bytes, processes=limits.processes,
                places=["/dev/shm", *places],
            ),
        ]
        # fmt: on


def _places(environment: Environment) -> list[str]:
    """Return the writable folders besides /dev/shm."""
    tools = map(str, environment.tools if environment.installs else ())
    return ["/tmp", *environment.places, *tools, environment.workdir]


def _originals(environment: Environment) -> dict[str, Path]:
    """Return where a sandbox with its own tools sees the folders that it copies."""
    return {f"{_ORIGINALS}/{index}": folder for index, folder in enumerate(environment.tools)}


def _unused_user() -> int:
    """Return a random id for the sandbox's user and group, among those that this process's user namespace has."""
    first, last = _USERS
    for kind in ("uid_map", "gid_map"):
        ranges = [[int(word) for word in line.split()] for line in Path("/proc/self", kind).read_text().splitlines()]
        start, count = max(((inside, count) for inside, _, count in ranges), key=lambda pair: pair[1])
        if start + count < last:  # a container without all ids: the upper half of its ids
            first, last = start + count // 2, min(last, start + count - 1000)
    return secrets.randbelow(last - first) + first


@cache
def _masks() -> list[str]:
    """Return the mounts that hide entries of /proc, and make /proc/sys read-only."""
    words = ["--ro-bind", "/proc/sys", "/proc/sys"]
    for name in _HIDDEN:
        path = Path("/proc") / name
        if path.is_dir():
            words += ["--tmpfs", str(path), "--remount-ro", str(path)]
        elif path.exists():
            words += ["--ro-bind", "/dev/null", str(path)]
    return words


def _system_binds(python: str, prefix: str | None) -> list[str]:
    """Return the mounts of the host's programs, libraries and interpreter."""
    binds: list[str] = []
    for path in _SYSTEM:
        if os.path.islink(path):
            binds += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            binds += ["--ro-bind", path, path]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        binds += ["--ro-bind-try", path, path]
    # Hide what users installed on the machine: it is not part of the sandbox, and it slows the interpreter's start.
    hidden = ["/usr/local"] if prefix != "/usr/local" and os.path.isdir("/usr/local") else []
    for path in [*hidden, *map(str, Path("/usr/lib").glob("python3*/dist-packages"))]:
        binds += ["--tmpfs", path, "--remount-ro", path]
    if prefix is not None and not prefix.startswith("/usr/"):
        binds += ["--ro-bind", prefix, prefix]
    for name in ("python", "python3"):
        binds += ["--symlink", python, f"{_TOOLS}/{name}"]
    return binds


class BubblewrapSandbox(GuestConnection):
    """One bubblewrap process with one guest. Enter, use and leave it in one thread: it dies with the thread that
    entered it."""

    def __init__(
        self, command: _Command, files: Mapping[str, str], limits: Limits, environment: Environment | None = None
    ) -> None:
        super().__init__(files, limits, environment)
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._check_environment()
        limits = self._limits
        disk = limits.file_bytes * (len(_places(self._environment)) + 1)
        self._group = MemoryGroup.create(limits.memory_bytes + disk + _OVERHEAD)
        read_end, write_end = os.pipe()
        os.write(write_end, self._command.seccomp[self._group is not None])  # far smaller than a pipe's buffer
        os.close(write_end)
        try:
            self._process = subprocess.Popen(
                self._command.line(limits, self._environment, read_end, self._group),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(read_end,),
                env={},
                cwd="/",
            )
        finally:
            os.close(read_end)
        self._channel = _PipeChannel(self._process)
        try:
            self._start_guest(self._command.guest)
            self._enter_group(self._process.pid)
        except GuestUnreachable:
            stop, reason = self._stopped_by(), self._stderr()
            self._close()
            self._require_own_end(stop)
            if any(str(folder) in reason for folder in self._folders()):
                raise EnvironmentUnavailable(
                    f"a folder cannot be shown in the sandbox: {reason}. {_READABLE}"
                ) from None
            raise SandboxUnavailable(namespaces.refused(reason)) from None
        try:
            self._fill_workspace()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        """Raise SandboxUnavailable if it was stopped from outside, perhaps with the command that ran last."""
        stop = self._close()
        if kind is None and not self._ended:
            self._require_own_end(stop)

    def _close(self) -> str:
        """End the sandbox; return the signal from outside that had ended it already."""
        process, self._process = self._process, None
        self._channel = None
        if process is None:
            return ""
        assert process.stdin and process.stdout and process.stderr
        with contextlib.suppress(OSError):
            process.stdin.close()  # the guest exits at the end of its stdin, and every process inside with it
        deadline, stop = time.monotonic() + (0 if self._ended else GRACE_SECONDS), ""
        try:  # wait for the end of its stdout, which comes at once; Popen.wait with a timeout polls in steps
            while True:
                wait_until_ready(process.stdout.fileno(), select.POLLIN, deadline)
                if not os.read(process.stdout.fileno(), 1 << 16):
                    break
            stop = self._signal_in(process.wait(), self._own_kills())
        except GuestUnreachable:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
        if self._group is not None:
            self._group.close()
        return stop

    def _enter_group(self, pid: int) -> None:
        """Move bubblewrap and the guest into the control group, before any command runs; raises GuestUnreachable if one
        of them is gone."""
        if self._group is not None:
            try:
                for process in [pid, *_descendants(pid)]:
                    self._group.add(process)
            except (FileNotFoundError, ProcessLookupError):
                raise GuestUnreachable from None

    def _stopped_by(self) -> str:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._signal_in(self._process.wait(self._end_seconds()), self._own_kills())
        return ""

    def _folders(self) -> list[Path]:
        checkout = self._environment.checkout
        return [*self._environment.tools, *([] if checkout is None else [checkout])]

    def _check_environment(self) -> None:
        """Raise EnvironmentUnavailable for an image without a checkout, and for a missing folder."""
        environment = self._environment
        if environment.image is not None and environment.checkout is None:
            raise EnvironmentUnavailable(
                f"the task's environment is the image {environment.image}, which bubblewrap cannot use: "
                'set sandbox = "docker", or prepare a checkout (docs/sandboxes.md) and name it in params.checkouts'
            )
        for folder in self._folders():
            if not folder.is_dir():
                raise EnvironmentUnavailable(f"{folder} is no folder; prepare it as docs/sandboxes.md says")

    def _fill_workspace(self) -> None:
        environment = self._environment
        if environment.installs:
            for place, folder in _originals(environment).items():
                self._copy(place, str(folder), folder)
        if environment.checkout is not None:
            self._copy(_CHECKOUT, environment.workdir, environment.checkout)
        self._write(self._files)

    def _copy(self, source: str, target: str, folder: Path) -> None:
        """Copy a folder that the sandbox sees into a writable place; `folder` is its name on the host."""
        copy = self.run(f"cp -a {source}/. {shlex.quote(target)}", timeout=_COPY_SECONDS)
        if copy.exit_code:
            raise EnvironmentUnavailable(
                f"{folder} does not fit into the sandbox: {copy.output[-500:].strip()}. {_READABLE} The disk limit is "
                f"{self._limits.file_bytes >> 20} MiB."
            )

    def _stderr(self) -> str:
        """Kill the sandbox and return its stderr."""
        assert self._process and self._process.stdin and self._process.stderr
        self._process.kill()
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # also ends a guest that is not yet tied to bubblewrap's end
        text, deadline = b"", time.monotonic() + END_SECONDS
        with contextlib.suppress(GuestUnreachable):
            while True:
                wait_until_ready(self._process.stderr.fileno(), select.POLLIN, deadline)
                if not (part := os.read(self._process.stderr.fileno(), 1 << 16)):
                    break
                text += part
        return text.decode("utf-8", "replace").strip()[-2000:] or "it said nothing"


class _PipeChannel:
    """A channel over the guest's stdin and stdout."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin and process.stdout
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()

    def is_closed(self) -> bool:
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        return any(event & select.POLLHUP and not event & select.POLLIN for _, event in poll.poll(0))

    def put(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        try:
            while view:  # write no more than a ready pipe accepts at once, so that a hung guest cannot block the host
                wait_until_ready(self._in, select.POLLOUT, deadline)
                view = view[os.write(self._in, view[: select.PIPE_BUF]) :]
        except OSError:
            raise GuestUnreachable from None

    def take(self, count: int, deadline: float) -> bytes:
        parts = []
        while count:
            wait_until_ready(self._out, select.POLLIN, deadline)
            part = os.read(self._out, min(count, 1 << 20))
            if not part:
                raise GuestUnreachable
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _descendants(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for child in children for each in (child, *_descendants(child))]


def _interpreter() -> tuple[str, str | None]:
    """Return the interpreter for commands and guest, and its prefix to mount; None for the system's own."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK):
            return path, None if path.startswith("/usr/bin") else "/usr/local"
    return os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)
