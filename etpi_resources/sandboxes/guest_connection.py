"""The host's end of the protocol with a guest: requests, answers, and the result if no answer comes.

Each kind of sandbox starts the guest itself and brings a `Channel` for the bytes. `guest` documents the frames.

If a command ends the sandbox itself (a subverted or starved guest), it and every later command return exit code 137,
and the workspace reads as empty. If it is ended from outside, they raise SandboxUnavailable.
"""

from __future__ import annotations

import contextlib
import re
import select
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Protocol

from etpi_resources.sandboxes import (
    REPLY,
    CommandResult,
    Environment,
    Limits,
    SandboxStopped,
    SandboxUnavailable,
)
from etpi_resources.sandboxes.memory_group import MemoryGroup

GUEST = Path(__file__).with_name("guest.py")
OPEN_FILES = 1024
START_SECONDS = 20.0
GRACE_SECONDS = 10.0
"""Time after a command's limit that the host waits for the guest's answer before it gives the sandbox up."""

END_SECONDS = 1.0
"""The time that a sandbox that no longer answers has to end."""

_FILES_SECONDS = 60.0
_LONGEST_SECONDS, _LONGEST_ERROR = 1e7, 4096


class GuestUnreachable(Exception):
    """The guest does not answer, or its answer is malformed."""


def wait_until_ready(fd: int, event: int, deadline: float) -> None:
    """Wait until a pipe or socket can be read or written. Raises GuestUnreachable if `deadline` passes first."""
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        raise GuestUnreachable


class Channel(Protocol):
    """Bytes to and from a guest. Both methods raise GuestUnreachable where the guest is gone or `deadline`
    (time.monotonic) passes."""

    def put(self, data: bytes, deadline: float) -> None: ...

    def take(self, count: int, deadline: float) -> bytes:
        """Return exactly `count` bytes."""
        ...

    def is_closed(self) -> bool:
        """Return whether the guest's end is closed and everything in it is read: the guest has ended."""
        ...


class GuestConnection:
    """The base class of sandboxes: the methods that talk to the guest. A subclass sets `_channel` while it runs."""

    def __init__(self, files: Mapping[str, str], limits: Limits, environment: Environment | None) -> None:
        self._files, self._limits, self._environment = pack(files), limits, environment or Environment()
        self._replies = iter(self._environment.replies)
        self._channel: Channel | None = None
        self._ended, self._stop = False, ""
        self._cpu_seconds: int | None = None
        self._group: MemoryGroup | None = None
        self._kills, self._machine_kills = 0, _machine_kills()

    def run(self, command: str, *, timeout: float | None = None) -> CommandResult:
        """Run one bash command; `timeout` in seconds, by default that of the limits.

        Raises SandboxUnavailable: the machine gives processes less CPU time; and as `_end`.
        """
        timeout = self._limits.command_seconds if timeout is None else timeout
        if self._cpu_seconds is not None and self._cpu_seconds <= timeout:
            raise SandboxUnavailable(
                f"processes here may take {self._cpu_seconds} seconds of CPU (ulimit -t), a command {timeout:g}; start "
                "etpi, or the container engine, without that limit"
            )
        started = time.monotonic()
        try:
            request = b"R%.3f\n" % timeout + command.encode("utf-8", "surrogatepass")
            return self._replied(self._result(self._request(request, timeout + GRACE_SECONDS)))
        except (GuestUnreachable, ValueError):  # ValueError: the answer does not parse, so the guest is subverted
            self._end()
            return CommandResult("[the sandbox has ended]", 137, time.monotonic() - started)

    def end_command(self) -> None:
        """End the command that another thread runs; its result has the flag of a limit."""
        if self._channel is not None:
            with contextlib.suppress(GuestUnreachable):
                self._channel.put(frame(b"K"), time.monotonic() + END_SECONDS)

    def _replied(self, result: CommandResult) -> CommandResult:
        """Put the host's next reply in place of a last line REPLY."""
        before, end, last = result.output.removesuffix("\n").rpartition("\n")
        if last != REPLY or not self._environment.replies:
            return result
        return replace(result, output="".join([before, end, *(f"{line}\n" for line in islice(self._replies, 1))]))

    def _result(self, reply: bytes) -> CommandResult:
        head, _, output = reply.partition(b"\n")
        code, flag, seconds, left_out = head.split(b" ")
        result = CommandResult("", int(code), float(seconds), flag == b"t", bool(int(left_out)))
        fits = len(output) <= self._limits.output_bytes + _LONGEST_ERROR and 0 <= int(left_out) < 1 << 63
        if not (fits and 0 <= result.exit_code < 256 and 0 <= result.seconds < _LONGEST_SECONDS):
            raise ValueError("the guest's answer is no result of a command")
        for_others = self._killed_for_others()
        if flag == b"k" or (for_others and result.exit_code == 137 and flag == b"-"):
            self._ended, self._stop = True, "the machine ran out of memory"
            self._require_own_end(self._stop)
        out_of_memory = self._out_of_memory()  # asked after every command, so that none is blamed for an earlier one
        text, flag = output.decode("utf-8", "replace"), b"m" if flag == b"-" and out_of_memory else flag
        reasons = {b"s": "too many sockets", b"n": "too many files"}
        reasons[b"m"] = f"more than {self._limits.memory_bytes >> 20} MiB of memory"
        reasons[b"d"] = f"more than {self._limits.file_bytes >> 20} MiB of disk"
        notes = [f"[{int(left_out)} more bytes left out]"] if result.truncated else []
        if flag in reasons:
            notes.append(f"[ended: {reasons[flag]}]")
        if notes and text and not text.endswith("\n"):
            text += "\n"
        text += "\n".join(notes)
        return replace(result, output=text)

    def write_files(self, files: Mapping[str, str]) -> None:
        """Write text files, by path relative to the workspace, and create their folders.

        Raises:
            ValueError: a path is absolute or contains `..`.
            OSError: the sandbox cannot write a file, or has ended.
        """
        self._write(pack(files))

    def read_files(self) -> dict[str, str]:
        """Return the workspace's files as `Sandbox` says; none if the sandbox has ended."""
        try:
            body = self._request(b"F" + "/".join(self._environment.unread).encode(), _FILES_SECONDS)
            files: dict[str, str] = {}
            for path, data in unpack(body):
                with contextlib.suppress(UnicodeDecodeError):
                    files[check_path(path.decode())] = data.decode()
            return dict(sorted(files.items()))
        except (GuestUnreachable, ValueError):
            self._end()
            return {}

    def _start_guest(self, guest: bytes) -> None:
        """Send the guest program and wait until it is ready; raises GuestUnreachable."""
        assert self._channel
        self._channel.put(guest, time.monotonic() + START_SECONDS)
        limit = self._receive(time.monotonic() + START_SECONDS)
        self._cpu_seconds = int(limit) if re.fullmatch(rb"\d{1,18}", limit) else None

    def _write(self, body: bytes) -> None:
        if not body:
            return
        try:
            problem = self._request(b"W" + body, _FILES_SECONDS)
        except GuestUnreachable:
            self._end()
            raise OSError("cannot write files: the sandbox has ended") from None
        if problem:
            raise OSError(f"cannot write into the sandbox: {problem[:500].decode('utf-8', 'replace')}")

    def _request(self, request: bytes, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        if self._ended or self._channel is None:
            raise GuestUnreachable
        self._channel.put(frame(request), deadline)
        self._watch(deadline)
        return self._receive(deadline)

    def _end(self) -> None:
        """Give the sandbox up.

        Raises:
            SandboxStopped: it was killed from outside, so its end is no result of the command's.
            SandboxUnavailable: it was ended by a signal that a run which ends sends to all its processes.
        """
        if not self._ended:
            self._ended, self._stop = True, self._stopped_by()
        self._require_own_end(self._stop)

    def _require_own_end(self, stop: str) -> None:
        if stop in ("SIGINT", "SIGTERM", "SIGHUP"):
            raise SandboxUnavailable(f"the sandbox was stopped from outside ({stop}), as a run that ends is")
        if stop:
            raise SandboxStopped(
                f"the sandbox was killed from outside ({stop}), by a person or for want of memory on the machine"
            )

    def _stopped_by(self) -> str:
        """Return what ended the sandbox from outside; "" if nothing did within END_SECONDS."""
        return ""

    def _end_seconds(self) -> float:
        """Return how long to wait for the end of the sandbox, which comes, perhaps late, where the guest has ended."""
        return GRACE_SECONDS if self._channel is not None and self._channel.is_closed() else END_SECONDS

    def _own_kills(self) -> int:
        """Return how many processes the kernel has ended at the sandbox's memory limit since the last result."""
        return 0 if self._group is None else self._group.kills() - self._kills

    @staticmethod
    def _signal_in(status: int, own_kills: int) -> str:
        """Return the signal that ended the guest, or bubblewrap, neither of which a command can signal; "" if none did,
        or if the kernel killed at the sandbox's memory limit."""
        number = status - 128 if status == 128 + signal.SIGKILL else -status
        killed_itself = number == signal.SIGKILL and own_kills > 0
        return "" if number <= 0 or killed_itself else signal.Signals(number).name

    def _out_of_memory(self) -> bool:
        """Return whether the kernel ended a process of the last command at the sandbox's memory limit."""
        kills = self._own_kills()
        self._kills += kills
        return kills > 0

    def _killed_for_others(self) -> bool:
        """Return whether the kernel has ended a process of the machine meanwhile, but none at the sandbox's limit."""
        before, self._machine_kills = self._machine_kills, _machine_kills()
        return self._machine_kills > before and not self._own_kills()

    def _watch(self, deadline: float) -> None:
        """Watch limits that the guest cannot, while it works; a subclass may override this."""

    def _receive(self, deadline: float) -> bytes:
        assert self._channel
        length = int.from_bytes(self._channel.take(4, deadline), "big")
        most = max(self._limits.file_bytes, self._limits.output_bytes) * 2 + (1 << 20)
        if length > most:
            raise GuestUnreachable
        return self._channel.take(length, deadline)


def _machine_kills() -> int:
    """Return how many processes the kernel has ended for want of memory since it started."""
    count = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(count[1]) if count else 0


def frame(body: bytes) -> bytes:
    """Return the body with its length in front, four bytes, most significant first."""
    return len(body).to_bytes(4, "big") + body


def guest_arguments(limits: Limits, *, address: int, processes: int, places: list[str]) -> list[str]:
    """Return the guest's command-line arguments.

    Args:
        address: bytes of address space per process; 0: the guest sets no limit.
        processes: processes of the sandbox's user; 0: the guest sets no limit.
        places: writable folders whose files the guest counts.
    """
    values = {
        "memory": limits.memory_bytes,
        "address": address,
        "processes": processes,
        "file": limits.file_bytes,
        "open_files": OPEN_FILES,
        "output": limits.output_bytes,
    }
    return [*(f"{key}={value}" for key, value in values.items()), *places]


def check_path(path: str) -> str:
    """Return the path if it is inside the workspace, else raise ValueError."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ValueError(f"{path!r}: sandbox files are named by a path relative to the workspace, without `..`")
    return path


def pack(files: Mapping[str, str]) -> bytes:
    """Encode files for the guest: a frame for each path and each text."""
    return b"".join(frame(data) for path, text in files.items() for data in (check_path(path).encode(), text.encode()))


def unpack(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (path, data) pairs. Raises ValueError if the body is malformed: the guest is not trusted."""
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
