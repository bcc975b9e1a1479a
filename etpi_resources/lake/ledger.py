"""Every publication and every check outcome of a lake, as tables for the catalog."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import pyarrow as pa

from etpi_resources.lake.check_outcome import shown
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import Manifest
from etpi_resources.lake.schemas import TIME

_PUBLICATION = {"asset": pa.string(), "set": pa.string(), "key": pa.string(), "version": pa.string()}
_PUBLICATION |= {"state": pa.string(), "created_at": TIME}

_MANIFEST: Mapping[str, tuple[pa.DataType, Callable[[Manifest], Any]]] = {
    "total_rows": (pa.int64(), lambda m: sum(m.rows.values())),
    "rows": (pa.string(), lambda m: json.dumps(m.rows)),
    "inputs": (pa.string(), lambda m: json.dumps(dict(m.inputs))),
    "input_key": (pa.string(), lambda m: m.input_key),
    "spec_hash": (pa.string(), lambda m: m.spec_hash),
    "code_version": (pa.string(), lambda m: json.dumps(m.code["versions"]) if "versions" in m.code else None),
    "cause": (pa.string(), lambda m: m.cause or None),
    "seconds": (pa.float64(), lambda m: m.seconds),
    "seeds": (pa.list_(pa.int64()), lambda m: list(m.seeds)),
    "notes": (pa.string(), lambda m: json.dumps(dict(m.notes), ensure_ascii=False)),
    "git_revision": (pa.string(), lambda m: m.git_revision),
    "fingerprint": (pa.string(), lambda m: json.dumps(dict(m.fingerprint))),
    "schema_version": (pa.int32(), lambda m: m.schema_version),
}
"""The columns of one publication, besides those of _PUBLICATION. `state` is current, blocked (newer than current, a
blocking check failed) or past. `rows` (by table), `inputs` ("asset/key" -> version), `notes`, `fingerprint` and
`code_version` (component -> number) are JSON. `cause` is why it was computed: first, spec, inputs or code. `seconds` is
the wall time of the computation."""

_CHECK: Mapping[str, tuple[pa.DataType, Callable[[Mapping[str, Any]], Any]]] = {
    "check_name": (pa.string(), lambda check: check["name"]),
    "passed": (pa.bool_(), lambda check: check["passed"]),
    "blocking": (pa.bool_(), lambda check: check["blocking"]),
    "message": (pa.string(), shown),
    "figures": (pa.string(), lambda check: json.dumps(check["figures"], ensure_ascii=False)),
    "applicable": (pa.bool_(), lambda check: check.get("applicable", True)),
}
"""The columns of one check of a publication; `figures` is JSON. A check that is not applicable counts as passed."""


def read(lake: Lake) -> dict[str, pa.Table]:
    """Return the tables "manifests" and "checks", sorted by asset, set, key and time."""
    manifests: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    for ref in lake.refs():
        current, blocked = lake.current(ref), lake.blocked(ref)
        for manifest in lake.history(ref):
            state = "current" if manifest == current else "blocked" if manifest == blocked else "past"
            created_at = datetime.fromisoformat(manifest.created_at)
            publication = dict(
                zip(_PUBLICATION, (ref.asset, ref.set, ref.key, manifest.version, state, created_at), strict=True)
            )
            manifests.append(publication | {name: read(manifest) for name, (_, read) in _MANIFEST.items()})
            for check in manifest.checks:
                checks.append(publication | {name: read(check) for name, (_, read) in _CHECK.items()})
    return {"manifests": _table(manifests, _MANIFEST), "checks": _table(checks, _CHECK)}


def _table(rows: list[dict[str, Any]], columns: Mapping[str, tuple[pa.DataType, Any]]) -> pa.Table:
    types = _PUBLICATION | {name: kind for name, (kind, _) in columns.items()}
    return pa.Table.from_pylist(rows, schema=pa.schema(types))
