"""The local default sandbox: namespaces through bubblewrap, limits, and a guest that runs the commands.

Belongs here: building the cage, and the pipes to its guest. Does not belong here: what happens inside (`guest`), what
is asked of it (`guest_connection`), and the denied system calls (`seccomp`).

What stands between a command and the host: namespaces of its own for users, mounts, processes, network, IPC and host
name; no capability, no further user namespace; /usr and the loader's cache read-only, and nothing else of the host's
files; private /proc, /dev, /tmp and /workspace, the writable ones of bounded size; an empty environment; limits on
memory, processes, file size, open files and CPU time; a filter of system calls; a wall clock. Started by root, the cage
belongs to an unprivileged user: the process limit does not bind root, and root's files in /proc stay closed.

Memory is bounded for each process by the kernel, and for all together by the guest, which looks every 50 ms and ends
the command: a control group would do it without the look, but only root, or a session manager, may make one.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Self

from etpi_resources.sandboxes import Environment, EnvironmentUnavailable, Limits, SandboxUnavailable, namespaces
from etpi_resources.sandboxes.guest_connection import GRACE_SECONDS, GUEST, GuestConnection, GuestUnreachable, settings
from etpi_resources.sandboxes.seccomp import filter_program

_USER = 64_117
"""The unprivileged user and group that a sandbox started by root runs as; any id that owns no files will do."""

_COPY_SECONDS = 120.0
"""How long a checkout may take to get into the workspace."""

_BOOT = "import marshal; exec(marshal.load(open(0, 'rb', closefd=False)))"
_COMPILE = (
    "import marshal, sys; "
    "marshal.dump(compile(sys.stdin.buffer.read(), 'guest', 'exec', optimize=2), sys.stdout.buffer)"
)
"""The guest comes first on its own stdin, so that it is not to be seen from inside, and compiled once for all sandboxes
by the interpreter that will run it."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_TOOLS = "/run/tools"
_CHECKOUT = "/run/checkout"
_READABLE = (
    "Everybody must be able to read it and enter its parents (chmod -R a+rX): commands run as a user of their own."
)


class BubblewrapFactory:
    """Makes bubblewrap sandboxes. Cheap to make and share between threads; nothing is looked up before the first
    sandbox starts."""

    name = "bubblewrap"

    def create(
        self,
        files: Mapping[str, str],
        limits: Limits = Limits(),  # noqa: B008
        environment: Environment | None = None,
    ) -> BubblewrapSandbox:
        """A sandbox whose workspace holds `files` (relative path -> text) over the environment's checkout. Raises
        ValueError for a path that is absolute or climbs; when entered, SandboxUnavailable where bubblewrap cannot work,
        and EnvironmentUnavailable where the environment is an image alone or its folders cannot be read."""
        return BubblewrapSandbox(self._command, files, limits, environment)

    def check(self) -> None:
        """Start and end one sandbox; raises SandboxUnavailable with the cause and remedies."""
        with self.create({}):
            pass

    @cached_property
    def _command(self) -> _Command:
        return _Command.here()


class _Command:
    """The command line that starts a cage, as far as it is the same for all."""

    def __init__(self, head: list[str], binds: list[str], python: str, seccomp: bytes, guest: bytes) -> None:
        self.head, self.binds, self.python, self.seccomp, self.guest = head, binds, python, seccomp, guest

    @classmethod
    def here(cls) -> _Command:
        """For this machine. Raises SandboxUnavailable where something is missing."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxUnavailable(namespaces.not_installed())
        try:
            seccomp = filter_program(platform.machine())
        except KeyError as error:
            raise SandboxUnavailable(f"{error.args[0]}; use another sandbox on this machine") from error
        head = [bwrap]
        if os.geteuid() == 0:
            setpriv = shutil.which("setpriv")
            if setpriv is None:
                raise SandboxUnavailable("setpriv is missing; root needs it to give up its rights. Install util-linux.")
            head = [setpriv, f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", "--", bwrap]
        python, prefix = _interpreter()
        binds: list[str] = []
        for path in _SYSTEM:
            if os.path.islink(path):
                binds += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                binds += ["--ro-bind", path, path]
        for path in ("/etc/ld.so.cache", "/etc/alternatives"):
            binds += ["--ro-bind-try", path, path]
        # What people have added to their machine is not part of the sandbox's, and slows its interpreter down.
        hidden = ["/usr/local"] if prefix != "/usr/local" and os.path.isdir("/usr/local") else []
        for path in [*hidden, *map(str, Path("/usr/lib").glob("python3*/dist-packages"))]:
            binds += ["--tmpfs", path, "--remount-ro", path]
        if prefix is not None and not prefix.startswith("/usr/"):
            binds += ["--ro-bind", prefix, prefix]
        for name in ("python", "python3"):
            binds += ["--symlink", python, f"{_TOOLS}/{name}"]
        compiled = subprocess.run(
            [python, "-I", "-S", "-c", _COMPILE], input=GUEST.read_bytes(), capture_output=True, check=True, env={}
        )
        return cls(head, binds, python, seccomp, compiled.stdout)

    def line(self, limits: Limits, environment: Environment, seccomp_fd: int) -> list[str]:
        disk = str(limits.file_bytes)
        variables = {
            "PATH": ":".join([*(f"{folder}/bin" for folder in environment.tools), _TOOLS, "/usr/bin", "/bin"]),
            "HOME": "/tmp",
            "USER": "agent",
            "LC_CTYPE": "C.UTF-8",  # what LANG would add is C's own, and a dozen files to open in every program
            "TERM": "dumb",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        workdir = environment.workdir
        shown = [word for folder in environment.tools for word in ("--ro-bind", str(folder), str(folder))]
        if environment.checkout is not None:
            shown += ["--ro-bind", str(environment.checkout), _CHECKOUT]
        places = ["/tmp", *environment.places, workdir]
        # fmt: off
        return [
            *self.head,
            "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000",
            "--cap-drop", "ALL", "--seccomp", str(seccomp_fd),
            "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox",
            "--clearenv", *(word for key, value in variables.items() for word in ("--setenv", key, value)),
            *self.binds,
            "--proc", "/proc",
            "--dev", "/dev", "--size", disk, "--tmpfs", "/dev/shm", "--remount-ro", "/dev",
            *(word for place in places for word in ("--size", disk, "--tmpfs", place)), *shown, "--remount-ro", "/",
            "--chdir", workdir,
            self.python, "-I", "-S", "-c", _BOOT,
            *settings(limits, address=limits.memory_bytes, processes=limits.processes, places=["/dev/shm", *places]),
        ]
        # fmt: on


class BubblewrapSandbox(GuestConnection):
    """One cage with one guest. To be entered, used and left in one thread: it dies with the thread that entered it."""

    def __init__(
        self, command: _Command, files: Mapping[str, str], limits: Limits, environment: Environment | None = None
    ) -> None:
        super().__init__(files, limits, environment)
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._refuse_what_is_not_here()
        read_end, write_end = os.pipe()
        os.write(write_end, self._command.seccomp)  # far below what a pipe holds
        os.close(write_end)
        try:
            self._process = subprocess.Popen(
                self._command.line(self._limits, self._environment, read_end),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(read_end,),
                env={},
                cwd="/",
            )
        finally:
            os.close(read_end)
        self._channel = _Pipes(self._process)
        try:
            self._greet(self._command.guest)
        except GuestUnreachable:
            reason = self._last_words()
            self.__exit__()
            if any(str(folder) in reason for folder in self._folders()):
                raise EnvironmentUnavailable(
                    f"a folder cannot be shown in the sandbox: {reason}. {_READABLE}"
                ) from None
            raise SandboxUnavailable(namespaces.refused(reason)) from None
        try:
            self._fill()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        process, self._process = self._process, None
        self._channel = None
        if process is None:
            return
        assert process.stdin and process.stdout and process.stderr
        with contextlib.suppress(OSError):
            process.stdin.close()  # the guest ends when its stdin does, and everything inside with it
        deadline = time.monotonic() + (0 if self._ended else GRACE_SECONDS)
        try:  # its end closes its stdout, which is heard of at once; Popen.wait with a timeout sleeps in steps
            while True:
                _wait(process.stdout.fileno(), select.POLLIN, deadline)
                if not os.read(process.stdout.fileno(), 1 << 16):
                    break
        except GuestUnreachable:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()

    def _folders(self) -> list[Path]:
        checkout = self._environment.checkout
        return [*self._environment.tools, *([] if checkout is None else [checkout])]

    def _refuse_what_is_not_here(self) -> None:
        environment = self._environment
        if environment.image is not None and environment.checkout is None:
            raise EnvironmentUnavailable(
                f"the task's environment is the image {environment.image}, which bubblewrap cannot use: "
                'set sandbox = "docker", or prepare a checkout (docs/sandboxes.md) and name it in params.checkouts'
            )
        for folder in self._folders():
            if not folder.is_dir():
                raise EnvironmentUnavailable(f"{folder} is no folder; prepare it as docs/sandboxes.md says")

    def _fill(self) -> None:
        if self._environment.checkout is not None:
            copied = self.run(f"cp -a {_CHECKOUT}/. {shlex.quote(self._environment.workdir)}", timeout=_COPY_SECONDS)
            if copied.exit_code:
                raise EnvironmentUnavailable(
                    f"{self._environment.checkout} does not fit into the workspace: {copied.output[-500:].strip()}. "
                    f"{_READABLE} The disk limit is {self._limits.file_bytes >> 20} MiB."
                )
        self._write(self._files)

    def _last_words(self) -> str:
        assert self._process and self._process.stderr
        self._process.kill()
        return self._process.stderr.read().decode("utf-8", "replace").strip()[-2000:] or "it said nothing"


class _Pipes:
    """The guest's stdin and stdout."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin and process.stdout
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()

    def put(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        try:
            while view:  # a guest that hangs must not hang the host: never more than a ready pipe takes at once
                _wait(self._in, select.POLLOUT, deadline)
                view = view[os.write(self._in, view[: select.PIPE_BUF]) :]
        except OSError:
            raise GuestUnreachable from None

    def take(self, count: int, deadline: float) -> bytes:
        parts = []
        while count:
            _wait(self._out, select.POLLIN, deadline)
            part = os.read(self._out, min(count, 1 << 20))
            if not part:
                raise GuestUnreachable
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        raise GuestUnreachable


def _interpreter() -> tuple[str, str | None]:
    """The interpreter for commands and guest, and the folder to show for it where that is not the system's own."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK):
            return path, None if path.startswith("/usr/bin") else "/usr/local"
    return os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)
