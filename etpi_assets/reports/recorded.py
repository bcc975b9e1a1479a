"""The specs behind the lake's versions: as loaded now, else as recorded when their assets ran."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from etpi_assets.specs.load import Specs
from etpi_resources.lake.lake import Lake, Ref

SpecState = Literal["loaded", "invalid", "missing"]


def recorded_spec(set: str, name: str, specs: Specs, lake: Lake) -> tuple[Mapping[str, Any], SpecState]:
    """Return the resolved spec of a suite, a rollout set or an experiment, and whether the loaded specs have it.

    It is the loaded one as JSON values, else the one that the lake recorded; empty if it was never recorded.
    """
    state: SpecState = "missing"
    if name in specs.keys(set):
        if (spec := specs.entry(set, name).spec) is not None:
            return spec.model_dump(mode="json"), "loaded"
        state = "invalid"
    ref = Ref(f"{set}_spec", set, name)
    rows = lake.read(ref, "specs", ["spec"]).to_pylist() if lake.current(ref) else []
    return json.loads(rows[0]["spec"]) if rows else {}, state
