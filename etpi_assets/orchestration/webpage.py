"""The metadata of a version on its asset's page in Dagster: links, first rows, and its origin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import dagster as dg

from etpi_assets.graph import Node
from etpi_resources import links
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import Manifest, Ref
from etpi_resources.lake.parquet import opened


def of_version(node: Node, manifest: Manifest, lake: Lake) -> dict[str, Any]:
    """Return the metadata that depend on the version alone, not on the run that computed it."""
    shown: dict[str, Any] = {}
    if "not_applicable" not in manifest.notes and (address := page(manifest.ref)):
        shown["view"] = dg.MetadataValue.url(address)
    for index, name in enumerate(node.tables):
        shown["dagster/row_count" if index == 0 else f"rows/{name}"] = manifest.rows.get(name, 0)
        shown[f"preview/{name}"] = preview(lake, manifest, name)
    return shown | {
        **({"seconds": round(manifest.seconds, 3)} if manifest.seconds is not None else {}),
        "inputs": dict(manifest.inputs),
        "code": dict(manifest.code.get("versions", {})),
    }


def _rollouts(origin: str) -> Callable[[str], str]:
    return lambda key: links.rollouts_page(origin=origin, made_for=key)


_PAGES: Mapping[str, Callable[[str], str]] = {
    "raw_rollouts": _rollouts("set"),
    "scored_rollouts": _rollouts("set"),
    "selected_trajectories": links.dataset_page,
    "tito_pairs": links.dataset_page,
    "upweighted_dataset": links.dataset_page,
    "rl_checkpoint": _rollouts("rl"),
    "rl_rewards": _rollouts("rl"),
    "eval_rollouts": _rollouts("eval"),
    "eval_metrics": links.regressions_page,
    "experiment_report": links.report_page,
    "leaderboard": lambda key: "/",
    "teacher_ceiling": lambda key: "/",
}
"""Asset -> the path of its page; any other asset of an experiment links to the experiment's page."""


def page(ref: Ref) -> str | None:
    """Return the address of the page about a partition; None if there is none."""
    path = _PAGES.get(ref.asset, links.experiment_page if ref.set == "experiment" else None)
    return links.view_url(path(ref.key)) if path else None


_MOST_ROWS, _MOST_CHARACTERS = 5, 60


def preview(lake: Lake, manifest: Manifest, table: str) -> dg.TableMetadataValue | str:
    """Return the first rows of a version's table, with long values cut, because Dagster limits metadata to 50 KB."""
    rows = islice(_rows(lake.files_of(manifest, table)), _MOST_ROWS)
    records = [dg.TableRecord({name: _cell(value) for name, value in row.items()}) for row in rows]
    return dg.MetadataValue.table(records) if records else "(no rows)"


def _rows(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield rows as they are stored, without `pyarrow.dataset`, which imports pandas."""
    for path in paths:
        with opened(path) as file:
            for batch in file.iter_batches(_MOST_ROWS):
                yield from batch.to_pylist()


def _cell(value: Any) -> str | int | None:
    if value is None or isinstance(value, int):
        return value
    text = f"{value:.4g}" if isinstance(value, float) else str(value[:8] if isinstance(value, list) else value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def report_unseen(instance: dg.DagsterInstance, lake: Lake) -> int:
    """Report the current versions that an instance has never seen, because they were copied or pulled; return how many.

    Dagster's page then shows each as a materialization without a run, with its rows; an older etpi may have written it.
    """
    reported = 0
    for ref in lake.refs():
        manifest = lake.current(ref)
        if manifest is None or lake.blocked(ref):
            continue
        key, partition = dg.AssetKey(ref.asset), None if ref.set == "all" else ref.key
        records = instance.fetch_materializations(
            dg.AssetRecordsFilter(asset_key=key, asset_partitions=[partition] if partition else None), limit=1
        ).records
        last = records[0].asset_materialization if records else None
        if last is None or (last.tags or {}).get("dagster/data_version") != manifest.version:
            metadata = {"published": manifest.created_at, **{f"rows/{name}": n for name, n in manifest.rows.items()}}
            tags = {"dagster/data_version": manifest.version}
            instance.report_runless_asset_event(
                dg.AssetMaterialization(asset_key=key, partition=partition, metadata=metadata, tags=tags)
            )
            reported += 1
    return reported
