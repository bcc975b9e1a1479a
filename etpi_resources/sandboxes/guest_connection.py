"""The host's side of the conversation with a guest, whatever cage the guest is in.

Belongs here: requests, answers, and what a caller is told when no answer comes. Does not belong here: starting a cage,
or how bytes get into it and out of it (a `Channel` of each kind). The frames are described in `guest`.

A command that ends the sandbox itself (a subverted or starved guest) gives exit code 137, and so does every command
after it; the workspace is empty from then on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Protocol

from etpi_resources.sandboxes import CommandResult, Environment, Limits

GUEST = Path(__file__).with_name("guest.py")
OPEN_FILES = 1024
START_SECONDS = 20.0
GRACE_SECONDS = 10.0
"""How long past a command's own time limit the guest has to answer before the sandbox is given up."""

_FILES_SECONDS = 60.0


class GuestUnreachable(Exception):
    """The guest does not answer any more."""


class Channel(Protocol):
    """Bytes to and from a guest. Both methods raise GuestUnreachable where the guest is gone or `deadline`
    (time.monotonic) passes."""

    def put(self, data: bytes, deadline: float) -> None: ...

    def take(self, count: int, deadline: float) -> bytes:
        """Exactly `count` bytes."""
        ...


class GuestConnection:
    """What both kinds of sandbox do alike. A subclass sets `_channel` while its guest runs."""

    def __init__(self, files: Mapping[str, str], limits: Limits, environment: Environment | None) -> None:
        self._files, self._limits, self._environment = packed(files), limits, environment or Environment()
        self._channel: Channel | None = None
        self._ended = False

    def run(self, command: str, *, timeout: float | None = None) -> CommandResult:
        """Run one bash command; `timeout` in seconds, the limits' own by default. Output: stdout and stderr as they
        came, with a note where something was left out or ended."""
        timeout = self._limits.command_seconds if timeout is None else timeout
        started = time.monotonic()
        try:
            request = b"R%.3f\n" % timeout + command.encode("utf-8", "surrogatepass")
            reply = self._ask(request, timeout + GRACE_SECONDS)
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
            if flag == b"d":
                notes.append(f"[ended: more than {self._limits.file_bytes >> 20} MiB of disk]")
            if notes and text and not text.endswith("\n"):
                text += "\n"
            text += "\n".join(notes)
            return CommandResult(text, int(code), float(seconds), flag == b"t", bool(int(left_out)))
        except (GuestUnreachable, ValueError):  # an answer that does not parse is not the guest's any more
            self._ended = True
            return CommandResult("[the sandbox has ended]", 137, time.monotonic() - started)

    def write_files(self, files: Mapping[str, str]) -> None:
        """Write text files, by path relative to the workspace; folders are made. Raises ValueError for a path that is
        absolute or climbs, OSError where the sandbox cannot take a file (or has ended)."""
        self._write(packed(files))

    def read_files(self) -> dict[str, str]:
        """Every regular UTF-8 file of the workspace by relative path but in folders that the environment says hold no
        work, at most `Limits.file_bytes` in all; links are not followed. Empty where the sandbox has ended."""
        try:
            body = self._ask(b"F" + "/".join(self._environment.unread).encode(), _FILES_SECONDS)
            files: dict[str, str] = {}
            for path, data in unpacked(body):
                with contextlib.suppress(UnicodeDecodeError):
                    files[checked(path.decode())] = data.decode()
            return dict(sorted(files.items()))
        except (GuestUnreachable, ValueError):
            self._ended = True
            return {}

    def _greet(self, guest: bytes) -> None:
        """Hand the guest over to the cage and hear that it is ready; raises GuestUnreachable."""
        assert self._channel
        self._channel.put(guest, time.monotonic() + START_SECONDS)
        self._receive(time.monotonic() + START_SECONDS)

    def _write(self, body: bytes) -> None:
        if not body:
            return
        try:
            problem = self._ask(b"W" + body, _FILES_SECONDS)
        except GuestUnreachable:
            self._ended = True
            raise OSError("cannot write files: the sandbox has ended") from None
        if problem:
            raise OSError(f"cannot write into the sandbox: {problem[:500].decode('utf-8', 'replace')}")

    def _ask(self, request: bytes, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        if self._ended or self._channel is None:
            raise GuestUnreachable
        self._channel.put(frame(request), deadline)
        self._watch(deadline)
        return self._receive(deadline)

    def _watch(self, deadline: float) -> None:
        """What a kind of sandbox looks after while the guest works."""

    def _receive(self, deadline: float) -> bytes:
        assert self._channel
        length = int.from_bytes(self._channel.take(4, deadline), "big")
        most = max(self._limits.file_bytes, self._limits.output_bytes) * 2 + (1 << 20)
        if length > most:
            raise GuestUnreachable
        return self._channel.take(length, deadline)


def frame(body: bytes) -> bytes:
    """A body with its length before it."""
    return len(body).to_bytes(4, "big") + body


def settings(limits: Limits, *, address: int, processes: int, places: list[str]) -> list[str]:
    """The guest's arguments: `address` bytes of one process and `processes` of the sandbox's user, 0 where the cage
    bounds them by other means; `places` whose files are counted."""
    values = {
        "memory": limits.memory_bytes,
        "address": address,
        "processes": processes,
        "file": limits.file_bytes,
        "open_files": OPEN_FILES,
        "output": limits.output_bytes,
    }
    return [*(f"{key}={value}" for key, value in values.items()), *places]


def checked(path: str) -> str:
    """The path, where it is one inside the workspace; else ValueError."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ValueError(f"{path!r}: sandbox files are named by a path relative to the workspace, without `..`")
    return path


def packed(files: Mapping[str, str]) -> bytes:
    """Files as the guest reads them."""
    return b"".join(frame(data) for path, text in files.items() for data in (checked(path).encode(), text.encode()))


def unpacked(body: bytes) -> Iterator[tuple[bytes, bytes]]:
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
