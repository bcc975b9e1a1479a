"""Values that depend on the content of source files alone, stored in the user's cache folder between processes."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path


class StoredValues:
    """Values of one signature in the user's cache folder; those of another signature are forgotten.

    Without a folder that can be written, nothing is stored.
    """

    def __init__(self, name: str, signature: str) -> None:
        self._file, self._signature = _cache_folder() / f"{name}.json", signature
        self.values: dict[str, str] = {}
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            if stored["signature"] == signature:
                self.values = dict(stored["values"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # missing, written by another version, or damaged

    def write(self) -> None:
        """Store the values; without a folder that can be written, do nothing."""
        _write(self._file, json.dumps({"signature": self._signature, "values": self.values}))


def signature_of(folders: Iterable[Path]) -> str:
    """Return a hash of the names, sizes and times of all files below the folders; one of them may be a file itself."""
    entries = []
    for folder in sorted(set(folders)):
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                stat = path.stat()
                entries.append((str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return hashlib.sha256(json.dumps([sys.version, entries]).encode()).hexdigest()


def _cache_folder() -> Path:
    """Return the folder of the XDG base directory specification."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path(os.path.expanduser("~/.cache"))) / "etpi"


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as out:
            out.write(text)
        os.replace(out.name, file)
    except OSError:
        pass  # a cache alone
