"""Temporary folders of cases, removed at the end of the process."""

from __future__ import annotations

import atexit
import tempfile
from pathlib import Path


def new_folder() -> Path:
    """Return a new empty folder, which sandboxes can enter."""
    folder = tempfile.TemporaryDirectory(prefix="etpi-golden-")
    atexit.register(folder.cleanup)
    path = Path(folder.name)
    path.chmod(0o755)
    return path
