"""The specs behind the lake's versions: as loaded now, else as recorded when their assets ran."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from etpi_assets.specs.load import MODELS, AnySpec, Specs
from etpi_resources.lake.lake import Lake, Ref

SpecState = Literal["loaded", "invalid", "missing"]


@dataclass(frozen=True)
class RecordedSpec:
    """The spec of a partition of the lake.

    Attributes:
        values: the resolved spec as JSON values: loaded, else recorded; empty if it was never recorded.
        state: whether the loaded specs have it: loaded, invalid, or missing.
    """

    name: str
    values: Mapping[str, Any]
    state: SpecState

    @property
    def title(self) -> str:
        return self.values.get("title") or self.name


def recorded_spec(set: str, name: str, specs: Specs, lake: Lake) -> RecordedSpec:
    """Return the spec of a suite, a rollout set or an experiment that the lake has data of."""
    state: SpecState = "missing"
    if name in specs.keys(set):
        entry = specs.entry(set, name)
        if entry.spec is not None:
            return RecordedSpec(name, entry.spec.model_dump(mode="json"), "loaded")
        state = "invalid"
    ref = Ref(f"{set}_spec", set, name)
    rows = lake.read(ref, "specs", ["spec"]).to_pylist() if lake.current(ref) else []
    return RecordedSpec(name, json.loads(rows[0]["spec"]) if rows else {}, state)


def parsed(set: str, spec: RecordedSpec) -> AnySpec | None:
    """Return the spec as its model; None if it was recorded under keys that this version of etpi does not know."""
    try:
        return MODELS[set].model_validate(spec.values)  # pyright: ignore[reportReturnType]
    except ValueError:
        return None
