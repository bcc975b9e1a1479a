"""How the progress of a run reaches the client that submitted it: datagrams on a socket that $ETPI_PROGRESS names.

The event log has everything that stays; these messages are only for the live block of a terminal and may get lost.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from etpi_resources.process.progress import Activity, set_display

SOCKET_VARIABLE = "ETPI_PROGRESS"
_LONGEST_MESSAGE = 65536


def send_progress(run_id: str) -> None:
    """Send what this process shows from now on to the client that listens, if there is one."""
    if path := os.environ.get(SOCKET_VARIABLE):
        set_display(_SentProgress(path, run_id))


class _SentProgress:
    """The display of a run's process."""

    def __init__(self, path: str, run_id: str) -> None:
        self._path, self._run_id = path, run_id
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def show(self, activity: Activity | None, source: str = "") -> None:
        message = json.dumps([self._run_id, asdict(activity) if activity else None])
        with suppress(OSError):  # the client has ended, or does not keep up
            self._socket.sendto(message.encode(), self._path)


@contextmanager
def received_progress(path: Path, show: Callable[[str, Activity | None], None]) -> Iterator[None]:
    """Call `show` with run id and activity for each message, from a thread, while the context lasts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))

        def receive() -> None:
            while message := receiver.recv(_LONGEST_MESSAGE):
                run_id, activity = json.loads(message)
                show(run_id, Activity(**activity) if activity else None)

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        try:
            yield
        finally:
            receiver.sendto(b"", str(path))  # ends the thread
            thread.join()
