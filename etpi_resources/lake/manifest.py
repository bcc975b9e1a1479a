"""`Ref` names a partition of an asset, `Manifest` describes a published version; and the errors of the lake."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from etpi_resources.errors import ExpectedError
from etpi_resources.inside import PathOutside, below
from etpi_resources.lake.provenance import environment_fingerprint, etpi_version, git_revision

SCHEMA_VERSION = 1
"""The format of manifests and tables that this etpi writes; `formats` says what raises it."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Valid names of assets and keys, which are names of folders."""


class LakeError(ExpectedError, RuntimeError):
    """A fault in the lake that a person must fix; the message says how."""


class MissingInput(LakeError):
    """An asset has no current version."""


class BlockedInput(LakeError):
    """An asset's newest version failed a blocking check."""


class NewerFormat(LakeError):
    """A newer etpi wrote the lake, in a format that this one does not know."""

    @classmethod
    def of(cls, place: Path | str, number: object, by: str | None = None) -> Self:
        """Return the error for a lake or a manifest of format `number`, which etpi `by` wrote."""
        writer = f"etpi {by}" if by else "a newer etpi"
        return cls(
            f"{place} was written by {writer} in format {number}; this is etpi {etpi_version()}, which knows formats "
            f"up to {SCHEMA_VERSION}. Install {writer} or later, or name another folder in ETPI_DATA."
        )


class DamagedFile(LakeError):
    """A file of the lake whose bytes are not those that were written."""

    @classmethod
    def of(cls, path: Path, fault: str) -> Self:
        """Return the error for a file, with the remedy."""
        remedy = "`etpi verify --deep` lists every damaged file; docs/lake.md says how to repair them"
        return cls(f"{path} is damaged: {fault}. {remedy}.")


@dataclass(frozen=True)
class Ref:
    """A partition of an asset. `set` is suite, rollout_set, experiment or all; if it is "all", so is `key`."""

    asset: str
    set: str
    key: str

    def __post_init__(self) -> None:
        for part in (self.asset, self.set, self.key):
            if not NAME.fullmatch(part):
                raise LakeError(f"{part!r} cannot name a folder of the lake; use letters, digits, '_', '-' and '.'")

    def __str__(self) -> str:
        return self.asset if self.set == "all" else f"{self.asset} ({self.set} {self.key})"

    @property
    def command(self) -> str:
        """Return the command that materializes the partition."""
        return f"etpi run {'catalog' if self.set == 'all' else self.key}"


@dataclass(frozen=True)
class Manifest:
    """A published version: its tables, inputs, code and check outcomes.

    Attributes:
        version: a hash of the tables' content; the data version.
        tables: name -> {"rows", "files": [{"path", "sha256", "bytes"}]}, paths relative to the root.
        spec: the resolved keys of the spec that the version depends on.
        code: {"versions": {component: number}} of the code that computed it; {"kept"}: the name of its stored
            expensive results. Up to etpi 0.2 digests: {"version", "modules", "kept", "kept_root"}; in 0.1 none.
        cause: why it was computed: "first", "spec", "inputs" or "code" ("code" also if its inputs changed only because
            they were rebuilt for changed code).
        seconds: wall time of the computation.
    """

    ref: Ref
    version: str
    tables: Mapping[str, Any]
    spec_hash: str
    input_key: str
    inputs: Mapping[str, str]
    seeds: Sequence[int]
    checks: Sequence[Mapping[str, Any]]
    notes: Mapping[str, Any]
    spec: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""
    seconds: float | None = None
    schema_version: int = SCHEMA_VERSION
    git_revision: str | None = field(default_factory=git_revision)
    fingerprint: Mapping[str, str] = field(default_factory=lambda: dict(environment_fingerprint()))
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))

    @property
    def failures(self) -> list[Mapping[str, Any]]:
        """Return the blocking checks that failed."""
        return [check for check in self.checks if check["blocking"] and not check["passed"]]

    @property
    def blocked(self) -> bool:
        return bool(self.failures)

    @property
    def rows(self) -> dict[str, int]:
        return {name: table["rows"] for name, table in self.tables.items()}

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "blocked": self.blocked}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Manifest:
        """Return the manifest of its JSON; fields that a later etpi added within the same format are ignored.

        Raises:
            NewerFormat: its format is newer than SCHEMA_VERSION. LakeError: it names a file outside the lake.
        """
        if (number := value.get("schema_version", 1)) > SCHEMA_VERSION:
            raise NewerFormat.of(f"the manifest of {Ref(**value['ref'])}", number)
        for file in (file for table in value.get("tables", {}).values() for file in table["files"]):
            try:
                below(file["path"])
            except PathOutside as error:
                raise LakeError(
                    f"the manifest of {Ref(**value['ref'])} names a file outside the lake: {error}"
                ) from None
        known = {name: item for name, item in value.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, "ref": Ref(**value["ref"])})
