"""Files written so that a crash leaves the old content or the new one, and their hashes and sizes on disk."""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's text; a crash leaves the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    beside.write_text(text)
    sync(beside)
    beside.replace(path)
    sync(path.parent)
