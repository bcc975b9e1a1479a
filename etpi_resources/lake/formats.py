"""The file `lake.json`, which names a lake's format.

A format number covers the form of manifests, pointers and tables. It is raised only by a change after which older files
would be misread: a renamed or retyped column or manifest field, another meaning or unit of a value, another path. A new
column, table, asset or manifest field needs no new format: it is null, or has its default, where older files lack it.
"""

from __future__ import annotations

import json
from pathlib import Path

from etpi_resources.inside import read_file
from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.manifest import SCHEMA_VERSION, LakeError, NewerFormat
from etpi_resources.lake.provenance import etpi_version

MARKER = "lake.json"


def mark(root: Path) -> None:
    """Write `lake.json` if it is missing. Call with the lock on publishing."""
    if not (root / MARKER).exists():
        write_atomically(root / MARKER, json.dumps({"format": SCHEMA_VERSION, "etpi": etpi_version()}) + "\n")


def require_known(root: Path) -> None:
    """Raise if this etpi cannot read the lake; one without `lake.json` has format 1, as before etpi wrote the file.

    Raises:
        NewerFormat: a newer etpi wrote it.
        LakeError: `lake.json` cannot be read.
    """
    try:
        stored = json.loads(read_file(root / MARKER))
        number, writer = int(stored["format"]), str(stored["etpi"])
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as error:
        raise LakeError(f"{root / MARKER} cannot be read ({error}); restore it from a backup") from error
    if number > SCHEMA_VERSION:
        raise NewerFormat.of(root, number, writer)
