"""Ask a process of math-verify (`equality`) whether answers are equal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

SECONDS = 5
"""Processor time of one comparison, since a busy machine must not decide it. math-verify's own limits are of wall time,
for each of its steps, and need the main thread."""
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
_PROGRAM = Path(__file__).with_name("equality.py")


class Undecided(Exception):
    """Two answers could not be compared; the message says why."""


class Comparer:
    """One process of math-verify, started at the first comparison and again after one that did not end.

    Args:
        seconds: the most processor time that one comparison may take.
    """

    def __init__(self, seconds: int = SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: str, *texts: str | int) -> bool:
        """Return the answer to a question of `equality`: equal, leaves or rewrites.

        Raises:
            Undecided: math-verify took too long, needed too much memory, or failed on the texts.
            RuntimeError: it does not run on this machine, or was ended from outside, as when a run is stopped.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", str(_PROGRAM), str(self.seconds)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    env={"OMP_NUM_THREADS": "1"}, cwd="/", text=True,
                )  # fmt: skip
            assert self._process.stdin is not None and self._process.stdout is not None
            try:
                self._process.stdin.write(json.dumps([question, *texts]) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
            if not line:
                status = self._process.wait()
                self._process = None
                if status >= 0 or -status in _FROM_OUTSIDE:
                    raise RuntimeError(f"math-verify does not run: {sys.executable} {_PROGRAM} ends with {status}")
                took = f"takes more than {self.seconds} s" if status == -signal.SIGPROF else f"died of signal {-status}"
                raise Undecided(f"the comparison {took}")
        result = json.loads(line)
        if not isinstance(result, bool):
            raise Undecided(f"the comparison failed: {result}")
        return result
