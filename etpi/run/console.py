"""Lines that a command prints while it works."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

quiet = False
"""True with `etpi -q`, which prints no progress."""
verbose = False
"""True with `etpi -v`, which prints the stack traces of expected errors too."""


def say(text: str) -> None:
    """Print one or more lines with the time of day on standard error; nothing with `etpi -q`."""
    if quiet:
        return
    with suppress(OSError, ValueError):  # the terminal is closed, but the work must go on
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")  # one write: runs side by side print from threads
