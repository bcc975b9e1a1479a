"""Files written so that a crash leaves the old content or the new one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str, check: Callable[[], None] = lambda: None) -> None:
    """Replace a file's text; a crash leaves the old text or the new one.

    Args:
        check: called right before the text is replaced, so that it may still raise.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    beside.write_text(text)
    sync(beside)
    try:
        check()
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync(path.parent)
