"""The local default sandbox: namespaces through bubblewrap, limits, and a guest that runs the commands.

Belongs here: building the cage, and the host's side of the conversation with the guest. Does not belong here: what
happens inside (`guest`), and the denied system calls (`seccomp`).

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
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Self

from etpi_resources.sandboxes import CommandResult, Limits, SandboxUnavailable
from etpi_resources.sandboxes.seccomp import filter_program

_GUEST = Path(__file__).with_name("guest.py")
_USER = 64_117
"""The unprivileged user and group that a sandbox started by root runs as; any id that owns no files will do."""

_OPEN_FILES = 256
_START_SECONDS = 20.0
_GRACE_SECONDS = 10.0
"""How long past a command's own time limit the guest has to answer before the sandbox is given up."""

_BOOT = "import marshal; exec(marshal.load(open(0, 'rb', closefd=False)))"
_COMPILE = (
    "import marshal, sys; "
    "marshal.dump(compile(sys.stdin.buffer.read(), 'guest', 'exec', optimize=2), sys.stdout.buffer)"
)
"""The guest comes first on its own stdin, so that it is not to be seen from inside, and compiled once for all sandboxes
by the interpreter that will run it."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_TOOLS = "/run/tools"
_INSTALL = "Install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)."
_NAMESPACES = (
    "Unprivileged user namespaces must be allowed: check `sysctl user.max_user_namespaces` (above 0), "
    "`kernel.unprivileged_userns_clone` (1, where it exists) and `kernel.apparmor_restrict_unprivileged_userns` "
    "(0, where it exists); in a container, allow them in its seccomp profile."
)


class BubblewrapFactory:
    """Makes bubblewrap sandboxes. Cheap to make and share between threads; nothing is looked up before the first
    sandbox starts."""

    name = "bubblewrap"

    def create(self, files: Mapping[str, str], limits: Limits = Limits()) -> BubblewrapSandbox:  # noqa: B008
        """A sandbox whose workspace holds `files` (relative path -> text). Raises ValueError for a path that is
        absolute or climbs; SandboxUnavailable, when entered, where bubblewrap cannot work."""
        return BubblewrapSandbox(self._command, files, limits)

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
            raise SandboxUnavailable(f"bubblewrap (bwrap) is not installed. {_INSTALL}")
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
        hidden = ["/usr/local"] if prefix != "/usr/local" else []
        for path in [*hidden, *map(str, Path("/usr/lib").glob("python3*/dist-packages"))]:
            binds += ["--tmpfs", path, "--remount-ro", path]
        if prefix is not None and not prefix.startswith("/usr/"):
            binds += ["--ro-bind", prefix, prefix]
        for name in ("python", "python3"):
            binds += ["--symlink", python, f"{_TOOLS}/{name}"]
        compiled = subprocess.run(
            [python, "-I", "-S", "-c", _COMPILE], input=_GUEST.read_bytes(), capture_output=True, check=True, env={}
        )
        return cls(head, binds, python, seccomp, compiled.stdout)

    def line(self, limits: Limits, seccomp_fd: int) -> list[str]:
        disk = str(limits.file_bytes)
        settings = {
            "memory": limits.memory_bytes,
            "processes": limits.processes,
            "file": limits.file_bytes,
            "open_files": _OPEN_FILES,
            "output": limits.output_bytes,
        }
        environment = {
            "PATH": f"{_TOOLS}:/usr/bin:/bin",
            "HOME": "/tmp",
            "USER": "agent",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        # fmt: off
        return [
            *self.head,
            "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000",
            "--cap-drop", "ALL", "--seccomp", str(seccomp_fd),
            "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox",
            "--clearenv", *(word for key, value in environment.items() for word in ("--setenv", key, value)),
            *self.binds,
            "--proc", "/proc",
            "--dev", "/dev", "--size", disk, "--tmpfs", "/dev/shm", "--remount-ro", "/dev",
            "--size", disk, "--tmpfs", "/tmp", "--size", disk, "--tmpfs", "/workspace", "--remount-ro", "/",
            "--chdir", "/workspace",
            self.python, "-I", "-S", "-c", _BOOT,
            *(f"{key}={value}" for key, value in settings.items()),
        ]
        # fmt: on


class BubblewrapSandbox:
    """One cage with one guest. To be entered, used and left in one thread: it dies with the thread that entered it.

    A command that ends the sandbox itself (a subverted or starved guest) gives exit code 137, and so does every
    command after it; the workspace is empty from then on.
    """

    def __init__(self, command: _Command, files: Mapping[str, str], limits: Limits) -> None:
        self._command, self._files, self._limits = command, _packed(files), limits
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def __enter__(self) -> Self:
        read_end, write_end = os.pipe()
        os.write(write_end, self._command.seccomp)  # far below what a pipe holds
        os.close(write_end)
        try:
            self._process = subprocess.Popen(
                self._command.line(self._limits, read_end),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(read_end,),
                env={},
                cwd="/",
            )
        finally:
            os.close(read_end)
        try:
            self._put(self._command.guest, time.monotonic() + _START_SECONDS)
            self._receive(time.monotonic() + _START_SECONDS)
        except _Ended:
            reason = self._last_words()
            self.__exit__()
            raise SandboxUnavailable(f"bubblewrap could not start a sandbox: {reason}. {_NAMESPACES}") from None
        self._write(self._files)
        return self

    def __exit__(self, *exc: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin and process.stdout and process.stderr
        with contextlib.suppress(OSError):
            process.stdin.close()  # the guest ends when its stdin does, and everything inside with it
        deadline = time.monotonic() + (0 if self._ended else _GRACE_SECONDS)
        try:  # its end closes its stdout, which is heard of at once; Popen.wait with a timeout sleeps in steps
            while True:
                self._wait(process.stdout.fileno(), select.POLLIN, deadline)
                if not os.read(process.stdout.fileno(), 1 << 16):
                    break
        except _Ended:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()

    def run(self, command: str, *, timeout: float | None = None) -> CommandResult:
        """Run one bash command; `timeout` in seconds, the limits' own by default. Output: stdout and stderr as they
        came, with a note where something was left out or ended."""
        timeout = self._limits.command_seconds if timeout is None else timeout
        started = time.monotonic()
        try:
            request = b"R%.3f\n" % timeout + command.encode("utf-8", "surrogatepass")
            reply = self._ask(request, timeout + _GRACE_SECONDS)
            head, _, output = reply.partition(b"\n")
            code, flag, seconds, left_out = head.split(b" ")
            text = output.decode("utf-8", "replace")
            notes = []
            if int(left_out):
                notes.append(f"[{int(left_out)} more bytes left out]")
            if flag == b"m":
                notes.append(f"[ended: more than {self._limits.memory_bytes >> 20} MiB of memory]")
            if flag == b"n":
                notes.append("[ended: too many files]")
            if notes and text and not text.endswith("\n"):
                text += "\n"
            text += "\n".join(notes)
            return CommandResult(text, int(code), float(seconds), flag == b"t", bool(int(left_out)))
        except (_Ended, ValueError):  # an answer that does not parse is not the guest's any more
            self._ended = True
            return CommandResult("[the sandbox has ended]", 137, time.monotonic() - started)

    def write_files(self, files: Mapping[str, str]) -> None:
        """Write text files, by path relative to the workspace; folders are made. Raises ValueError for a path that is
        absolute or climbs, OSError where the sandbox cannot take a file (or has ended)."""
        self._write(_packed(files))

    def read_files(self) -> dict[str, str]:
        """Every regular UTF-8 file of the workspace by relative path, at most `Limits.file_bytes` in all; links are not
        followed. Empty where the sandbox has ended."""
        try:
            body = self._ask(b"F", _GRACE_SECONDS + 20)
            files: dict[str, str] = {}
            for path, data in _unpacked(body):
                with contextlib.suppress(UnicodeDecodeError):
                    files[_checked(path.decode())] = data.decode()
            return dict(sorted(files.items()))
        except (_Ended, ValueError):
            self._ended = True
            return {}

    def _write(self, packed: bytes) -> None:
        if not packed:
            return
        try:
            problem = self._ask(b"W" + packed, _GRACE_SECONDS + 20)
        except _Ended:
            self._ended = True
            raise OSError("cannot write files: the sandbox has ended") from None
        if problem:
            raise OSError(f"cannot write into the sandbox: {problem[:500].decode('utf-8', 'replace')}")

    def _ask(self, request: bytes, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        if self._ended or self._process is None:
            raise _Ended
        self._put(len(request).to_bytes(4, "big") + request, deadline)
        return self._receive(deadline)

    def _put(self, data: bytes, deadline: float) -> None:
        assert self._process and self._process.stdin
        fd, view = self._process.stdin.fileno(), memoryview(data)
        try:
            while view:  # a guest that hangs must not hang the host: never more than a ready pipe takes at once
                self._wait(fd, select.POLLOUT, deadline)
                view = view[os.write(fd, view[: select.PIPE_BUF]) :]
        except OSError:
            raise _Ended from None

    def _receive(self, deadline: float) -> bytes:
        length = int.from_bytes(self._exactly(4, deadline), "big")
        most = max(self._limits.file_bytes, self._limits.output_bytes) * 2 + (1 << 20)
        if length > most:
            raise _Ended
        return self._exactly(length, deadline)

    def _exactly(self, count: int, deadline: float) -> bytes:
        assert self._process and self._process.stdout
        fd, parts = self._process.stdout.fileno(), []
        while count:
            self._wait(fd, select.POLLIN, deadline)
            part = os.read(fd, min(count, 1 << 20))
            if not part:
                raise _Ended
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    @staticmethod
    def _wait(fd: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            raise _Ended

    def _last_words(self) -> str:
        assert self._process and self._process.stderr
        self._process.kill()
        return self._process.stderr.read().decode("utf-8", "replace").strip()[-2000:] or "it said nothing"


class _Ended(Exception):
    """The guest does not answer any more."""


def _interpreter() -> tuple[str, str | None]:
    """The interpreter for commands and guest, and the folder to show for it where that is not the system's own."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK):
            return path, None if path.startswith("/usr/bin") else "/usr/local"
    return os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)


def _checked(path: str) -> str:
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ValueError(f"{path!r}: sandbox files are named by a path relative to the workspace, without `..`")
    return path


def _packed(files: Mapping[str, str]) -> bytes:
    parts: list[bytes] = []
    for path, text in files.items():
        for data in (_checked(path).encode(), text.encode()):
            parts += [len(data).to_bytes(4, "big"), data]
    return b"".join(parts)


def _unpacked(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(path, data) pairs. Raises ValueError for anything else: the guest is not trusted to be well-formed."""
    at = 0
    while at < len(body):
        pair = []
        for _ in range(2):
            length = int.from_bytes(body[at : at + 4], "big")
            data = body[at + 4 : at + 4 + length]
            if len(data) != length or at + 4 > len(body):
                raise ValueError("the sandbox's file list is malformed")
            pair.append(data)
            at += 4 + length
        yield pair[0], pair[1]
