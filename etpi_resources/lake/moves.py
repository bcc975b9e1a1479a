"""Move many pointers of a lake as one: `moving.json` names them all before the first moves, and survives a kill.

Whoever opens the lake next finishes the moves, so nobody computes from a mixture of two states.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.manifest import LakeError
from etpi_resources.lake.store import read_pointer, swap
from etpi_resources.process.locks import lake_locks

PENDING = "moving.json"


def move(
    root: Path, pointers: Mapping[str, tuple[bytes | None, bytes | None]], replaced: Mapping[str, str] | None = None
) -> None:
    """Replace pointers and files, under the lock on publishing.

    Args:
        pointers: path in the lake -> (expected content, new content); None: there is none.
        replaced: path in the lake -> the path in the lake of the file that replaces it, if that still exists.

    Raises:
        LakeError: a run has moved a pointer; nothing was replaced.
    """
    if moved := [path for path, (expected, _) in pointers.items() if read_pointer(root / path) != expected]:
        raise LakeError(f"{moved[0]} was published meanwhile; nothing was replaced. Run the same command again")
    texts = {path: [content and content.decode() for content in contents] for path, contents in pointers.items()}
    write_atomically(root / PENDING, json.dumps({"pointers": texts, "replaced": dict(replaced or {})}))
    _carry_out(root)


def finish(root: Path) -> None:
    """Carry out the moves that a killed process named."""
    if (root / PENDING).exists() and os.access(root, os.W_OK):
        with lake_locks(root).hold(root / "locks" / "publish.lock"):
            if (root / PENDING).exists():  # else the process lives, and has just finished them
                _carry_out(root)


def _carry_out(root: Path) -> None:
    value = json.loads((root / PENDING).read_bytes())
    for path, (expected, new) in value["pointers"].items():
        if read_pointer(root / path) != (expected and expected.encode()):
            continue  # moved before the kill
        if new is None:
            (root / path).unlink(missing_ok=True)
        else:
            swap(root / path, new.encode(), expected=expected and expected.encode())
    for path, source in value["replaced"].items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            (root / source).replace(root / path)
    (root / PENDING).unlink()
