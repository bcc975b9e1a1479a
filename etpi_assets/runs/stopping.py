"""Detect SIGINT and SIGTERM, regardless of the installed handlers."""

from __future__ import annotations

import signal
import socket
from typing import Self


class StopRequests:
    """Records SIGINT and SIGTERM while its block runs, in the main thread.

    Dagster installs its own handlers around a run and loses a signal that arrives between two of its checks. Python
    writes each signal to the wakeup descriptor before it calls a handler, so this class loses none.
    """

    def __enter__(self) -> Self:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(self._previous)
        self._receiver.close()
        self._sender.close()

    def any(self) -> bool:
        """Return whether one of the signals arrived since the last call."""
        try:
            caught = self._receiver.recv(4096)
        except BlockingIOError:
            return False
        return bool({signal.SIGINT, signal.SIGTERM}.intersection(caught))


def wake_on_sigint() -> None:
    """Let SIGINT wake the main thread while it waits for other threads.

    With the handler that polars installs it would wait on, until all of their work is done.
    """
    signal.siginterrupt(signal.SIGINT, True)
