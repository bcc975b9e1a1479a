"""The metadata of a materialization: what a person looks for first, then where the version comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from etpi_assets.graph import Node
from etpi_assets.orchestration.webpage.figures import floats
from etpi_assets.orchestration.webpage.links import page
from etpi_assets.orchestration.webpage.preview import preview
from etpi_resources.lake import parquet
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import Manifest


def of_version(node: Node, manifest: Manifest, lake: Lake) -> dict[str, Any]:
    """Return the metadata that depend on the version alone, not on the run that computed it."""
    shown: dict[str, Any] = {}
    plotted: Mapping[str, float] = {}
    if "not_applicable" not in manifest.notes:
        if address := page(manifest.ref):
            shown["view"] = dg.MetadataValue.url(address)
        if node.name == "eval_metrics":
            plotted = floats(parquet.read("metrics", lake.files_of(manifest, "metrics")).to_pylist())
    for index, name in enumerate(node.tables):
        shown["dagster/row_count" if index == 0 else f"rows/{name}"] = manifest.rows[name]
        shown[f"preview/{name}"] = preview(lake, manifest, name)
    return shown | {
        **({"seconds": round(manifest.seconds, 3)} if manifest.seconds is not None else {}),
        "inputs": dict(manifest.inputs),
        "code": manifest.code.get("version", ""),
        **({"accepted": [dict(entry) for entry in manifest.accepted]} if manifest.accepted else {}),
        **plotted,
    }
