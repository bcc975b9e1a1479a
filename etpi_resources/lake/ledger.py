"""Every publication and every check outcome of a lake, as tables for the catalog."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pyarrow as pa

from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import Manifest
from etpi_resources.lake.schemas import TIME

_PUBLICATION = [
    pa.field("asset", pa.string()),
    pa.field("set", pa.string()),
    pa.field("key", pa.string()),
    pa.field("version", pa.string()),
    pa.field("state", pa.string()),
    pa.field("created_at", TIME),
]

MANIFESTS = pa.schema(
    [
        *_PUBLICATION,
        pa.field("total_rows", pa.int64()),
        pa.field("rows", pa.string()),
        pa.field("inputs", pa.string()),
        pa.field("input_key", pa.string()),
        pa.field("spec_hash", pa.string()),
        pa.field("code_version", pa.string()),
        pa.field("cause", pa.string()),
        pa.field("accepted", pa.string()),
        pa.field("seconds", pa.float64()),
        pa.field("seeds", pa.list_(pa.int64())),
        pa.field("notes", pa.string()),
        pa.field("git_revision", pa.string()),
        pa.field("fingerprint", pa.string()),
        pa.field("schema_version", pa.int32()),
    ]
)
"""One row per publication. `state` is current, blocked (newer than current, a blocking check failed) or past. `rows`
(by table), `inputs` ("asset/key" -> version), `notes`, `fingerprint` and `accepted` (code changes) are JSON.
`cause` is why it was computed: first, spec, inputs or code. `seconds` is the wall time of the computation."""

CHECKS = pa.schema(
    [
        *_PUBLICATION,
        pa.field("check_name", pa.string()),
        pa.field("passed", pa.bool_()),
        pa.field("blocking", pa.bool_()),
        pa.field("message", pa.string()),
        pa.field("figures", pa.string()),
        pa.field("applicable", pa.bool_()),
    ]
)
"""One row per check of a publication; `figures` is JSON. A check that is not applicable counts as passed."""


def read(lake: Lake) -> dict[str, pa.Table]:
    """Return the tables "manifests" and "checks", sorted by asset, set, key and time."""
    manifests: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    for ref in lake.refs():
        current, blocked = lake.current(ref), lake.blocked(ref)
        for manifest in lake.history(ref):
            state = "current" if manifest == current else "blocked" if manifest == blocked else "past"
            publication = {
                "asset": ref.asset,
                "set": ref.set,
                "key": ref.key,
                "version": manifest.version,
                "state": state,
                "created_at": datetime.fromisoformat(manifest.created_at),
            }
            manifests.append(publication | _manifest_columns(manifest))
            checks.extend(publication | _check_columns(check) for check in manifest.checks)
    return {
        "manifests": pa.Table.from_pylist(manifests, schema=MANIFESTS),
        "checks": pa.Table.from_pylist(checks, schema=CHECKS),
    }


def _manifest_columns(manifest: Manifest) -> dict[str, Any]:
    return {
        "total_rows": sum(manifest.rows.values()),
        "rows": json.dumps(manifest.rows),
        "inputs": json.dumps(dict(manifest.inputs)),
        "input_key": manifest.input_key,
        "spec_hash": manifest.spec_hash,
        "code_version": manifest.code.get("version"),
        "cause": manifest.cause or None,
        "accepted": json.dumps(list(manifest.accepted), ensure_ascii=False),
        "seconds": manifest.seconds,
        "seeds": list(manifest.seeds),
        "notes": json.dumps(dict(manifest.notes), ensure_ascii=False),
        "git_revision": manifest.git_revision,
        "fingerprint": json.dumps(dict(manifest.fingerprint)),
        "schema_version": manifest.schema_version,
    }


def _check_columns(check: Any) -> dict[str, Any]:
    return {
        "check_name": check["name"],
        "passed": check["passed"],
        "blocking": check["blocking"],
        "message": check["message"],
        "figures": json.dumps(check["figures"], ensure_ascii=False),
        "applicable": check.get("applicable", True),
    }
