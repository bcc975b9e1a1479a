"""A version of an asset as a value: which partition it is of, what it holds, came from and was found to be.

Belongs here: `Ref`, `Manifest` and the errors a consumer of versions meets. Does not belong here: files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from etpi_resources.lake.provenance import environment_fingerprint, git_revision

SCHEMA_VERSION = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""What may name an asset or a key, and so a folder."""


class LakeError(RuntimeError):
    """Something about the lake that a person must act on; the message says what."""


class MissingInput(LakeError):
    """An asset has no current version."""


class BlockedInput(LakeError):
    """An asset's newest version failed a blocking check."""


@dataclass(frozen=True)
class Ref:
    """An asset's partition: `set` is suite, rollout_set, experiment or all; key is "all" where the set is."""

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
        """The command that materializes it."""
        partition = "" if self.set == "all" else f" --partition {self.key}"
        return f"dg launch --assets {self.asset}{partition}"


@dataclass(frozen=True)
class Manifest:
    """What a published version is, came from and was found to be.

    Attributes:
        version: hashes the tables' content; the data version.
        tables: name -> {"rows", "files": [{"path", "sha256", "bytes"}]}, paths relative to the root.
        spec: the resolved keys of the spec that the version depends on.
        code: {"version", "modules": {module: hash}} of the code that made it, {"kept"} of the part whose results are
            kept, {"kept_root"}: the version those results were first kept under, where a later change of code was
            accepted. Empty in manifests of etpi 0.1, which recorded none.
        cause: why it was made: "first", "spec", "inputs" or "code" ("code" too where only a rebuild for changed code
            changed its inputs).
        accepted: changes of code that a person judged immaterial to this version, oldest first: {"by", "at",
            "because", "from", "to"} with code versions.
        seconds: wall time of computing it.
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
    accepted: Sequence[Mapping[str, str]] = ()
    seconds: float | None = None
    schema_version: int = SCHEMA_VERSION
    git_revision: str | None = field(default_factory=git_revision)
    fingerprint: Mapping[str, str] = field(default_factory=lambda: dict(environment_fingerprint()))
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))

    @property
    def failures(self) -> list[Mapping[str, Any]]:
        """The blocking checks that failed."""
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
        fields = {name: item for name, item in value.items() if name != "blocked"}
        return cls(**{**fields, "ref": Ref(**value["ref"])})
