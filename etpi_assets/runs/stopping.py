"""Whether this process was asked to stop.

Belongs here: noticing SIGINT and SIGTERM whichever handler stands for them. Does not belong here: acting on them.
"""

from __future__ import annotations

import signal
import socket
from typing import Self


class StopRequests:
    """Remembers SIGINT and SIGTERM from entering on, in the main thread.

    Dagster puts handlers of its own around a run and forgets a signal that comes between two of its checks. Python
    writes each signal to the wakeup descriptor before any handler, so none is lost here.
    """

    def __enter__(self) -> Self:
        self._read, self._written = socket.socketpair()
        self._read.setblocking(False)
        self._written.setblocking(False)
        self._before = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(self._before)
        self._read.close()
        self._written.close()

    def any(self) -> bool:
        """Whether one came since the last call."""
        try:
            caught = self._read.recv(4096)
        except BlockingIOError:
            return False
        return bool({signal.SIGINT, signal.SIGTERM}.intersection(caught))
