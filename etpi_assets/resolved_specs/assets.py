"""The assets suite_spec, rollout_set_spec and experiment_spec: resolved specs as rows."""

from __future__ import annotations

import hashlib
import json

from etpi_assets.asset import AssetRun, Produced, asset
from etpi_resources.lake.schemas import from_rows


@asset(
    set="suite",
    group="specs",
    tables=("specs",),
    sections=("*",),
    kinds=("toml",),
    versions=("spec_rows",),
    summary="A suite's resolved spec.",
)
def suite_spec(run: AssetRun) -> Produced:
    return _spec(run)


@asset(
    set="rollout_set",
    group="specs",
    tables=("specs",),
    sections=("*",),
    kinds=("toml",),
    versions=("spec_rows",),
    summary="A rollout set's resolved spec.",
)
def rollout_set_spec(run: AssetRun) -> Produced:
    return _spec(run)


@asset(
    set="experiment",
    group="specs",
    tables=("specs",),
    sections=("*",),
    kinds=("toml",),
    versions=("spec_rows",),
    summary="An experiment's resolved spec.",
)
def experiment_spec(run: AssetRun) -> Produced:
    return _spec(run)


def _spec(run: AssetRun) -> Produced:
    text = json.dumps(run.spec.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
    row = {
        "kind": run.node.set,
        "name": run.key,
        "title": run.spec.title,
        "spec": text,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    return Produced(
        tables={"specs": from_rows("specs", [row])},
        metadata={"spec": run.spec.model_dump(mode="json"), "file": str(run.specs.entry(run.node.set, run.key).file)},
    )
