"""A sensor that imports a rollout set again when files in its folder are new or changed and nobody writes them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg

from etpi_assets.specs.load import SpecError, Specs, load_specs
from etpi_assets.specs.paths import PathError, expand, fingerprint

SENSOR, JOB = "import_new_files", "collect_rollouts"
QUIET_SECONDS = 60
"""A folder is imported once its newest file is so old and the listing is that of the evaluation before."""
ABSENT = "absent"

Cursor = dict[str, dict[str, str]]
"""Rollout set -> {"seen": fingerprint at the last evaluation, "requested": the one that was last imported}."""


def import_sensor() -> dg.SensorDefinition:
    """Return the sensor; it is stopped until someone starts it."""

    @dg.sensor(
        name=SENSOR,
        job_name=JOB,
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Imports a rollout set again after files in its folder were added, changed or removed, once they "
        f"have been left alone for {QUIET_SECONDS} s.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        try:
            specs = load_specs()
        except SpecError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        folders = imported_folders(specs)
        if not folders:
            return dg.SkipReason("no rollout set imports a folder that exists")
        cursor, due = evaluate(folders, json.loads(context.cursor or "{}"), time.time())
        requests = [
            dg.RunRequest(
                run_key=f"{name}-{cursor[name]['requested']}", partition_key=name, tags={"etpi/sensor": SENSOR}
            )
            for name in due
        ]
        return dg.SensorResult(run_requests=requests, cursor=json.dumps(cursor))

    return sensor


def imported_folders(specs: Specs) -> dict[str, str]:
    """Return rollout set -> the path it imports, as written, for those whose path can be resolved and exists."""
    folders = {}
    for name, spec in specs.rollout_sets.items():
        try:
            if spec.kind == "imported" and spec.path and expand(spec.path).exists():
                folders[name] = spec.path
        except PathError:
            continue  # its variable is not set on this machine
    return folders


def evaluate(folders: Mapping[str, str], before: Mapping[str, Any], now: float) -> tuple[Cursor, list[str]]:
    """Return the next cursor and the rollout sets to import.

    The first evaluation of a folder only records it: switching the sensor on imports nothing.
    """
    cursor: Cursor = {}
    due = []
    for name, path in folders.items():
        listing = fingerprint(path)
        last = before.get(name) or {"seen": listing, "requested": listing}
        cursor[name] = {"seen": listing, "requested": last["requested"]}
        settled = listing == last["seen"] and now - newest(expand(path)) >= QUIET_SECONDS
        if listing not in (last["requested"], ABSENT) and settled:
            cursor[name]["requested"] = listing
            due.append(name)
    return cursor, due


def newest(root: Path) -> float:
    """Return the time at which a file below a path, or a folder's list of files, last changed; seconds since 1970."""
    paths = [root, *root.rglob("*")] if root.is_dir() else [root]
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)
