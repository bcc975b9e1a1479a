"""The file `lake.json`, which names a lake's format; `migrations` brings a lake from one format to the next."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.manifest import SCHEMA_VERSION, LakeError, NewerFormat
from etpi_resources.lake.provenance import etpi_version

MARKER = "lake.json"


@dataclass(frozen=True)
class Format:
    """The content of `lake.json`.

    Attributes:
        format: the format of every manifest.
        etpi: the version of etpi that created or migrated the lake.
        migrating: the format that an unfinished migration leads to.
    """

    format: int = 1
    etpi: str = "0.1.0"
    migrating: int | None = None


def read(root: Path) -> Format:
    """Return a lake's format; without `lake.json`, 1 if anything was published, as before etpi wrote the file.

    Raises:
        LakeError: the file cannot be read.
    """
    try:
        stored = json.loads((root / MARKER).read_bytes())
        return Format(int(stored["format"]), str(stored["etpi"]), stored.get("migrating"))
    except FileNotFoundError:
        published = any(root.glob("*/*=*/version=*/manifest-*.json"))
        return Format() if published else Format(SCHEMA_VERSION, etpi_version())
    except (ValueError, KeyError, TypeError) as error:
        raise LakeError(
            f"{root / MARKER} cannot be read ({error}); restore it from a backup, or write "
            f'{{"format": 1, "etpi": "0.1.0"}} if this etpi wrote the lake'
        ) from error


def write(root: Path, stored: Format) -> None:
    """Replace `lake.json`."""
    kept = {name: value for name, value in asdict(stored).items() if value is not None}
    write_atomically(root / MARKER, json.dumps(kept) + "\n")


def mark(root: Path) -> None:
    """Write `lake.json` if it is missing. Call with the lock on publishing."""
    if not (root / MARKER).exists():
        write(root, Format(SCHEMA_VERSION, etpi_version()))


def require_known(root: Path) -> None:
    """Raise if this etpi cannot read the lake as it is.

    Raises:
        NewerFormat: a newer etpi wrote it.
        LakeError: it has an older format, or a migration was interrupted.
    """
    stored = read(root)
    if max(stored.format, stored.migrating or 0) > SCHEMA_VERSION:
        raise NewerFormat.of(root, max(stored.format, stored.migrating or 0), stored.etpi)
    if stored.migrating is not None:
        raise LakeError(
            f"the migration of {root} to format {stored.migrating} was interrupted; run `etpi migrate --yes`"
        )
    if stored.format < SCHEMA_VERSION:
        raise LakeError(
            f"{root} has format {stored.format} (etpi {stored.etpi}); this etpi works with format {SCHEMA_VERSION}. "
            "`etpi migrate` shows what would change, `etpi migrate --yes` changes it"
        )
