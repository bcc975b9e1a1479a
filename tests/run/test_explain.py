"""`etpi explain`: the parts of a key, and how two versions of a data set differ."""

from __future__ import annotations

import pytest

from etpi_assets.planning.explain import explain
from etpi_assets.specs.load import SpecError
from etpi_resources.lake.lake import Lake, LakeError, Ref
from etpi_resources.lake.manifest import RunRecord
from etpi_resources.lake.schemas import from_rows
from tests.support.graph import EXPERIMENT, write_spec


def test_the_parts_of_a_key_and_what_changed_in_each(world, code):
    world.make_all()
    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT + "[dataset]\nupweight_factor = 3\n")
    code["upweighted_dataset"] = "2"
    resources = world.resources()
    text = "\n".join(explain("upweighted_dataset", "first", resources.specs, resources.lake))
    assert "upweighted_dataset of first: stale: its spec changed: dataset.upweight_factor 1.0 → 3.0" in text
    assert "changed since: spec: dataset.upweight_factor 1.0 → 3.0" in text
    assert "input: tito_pairs/first " in text and "changed since: code: made.upweighted_dataset" in text


def _rows(weights: dict[str, float]) -> dict:
    rows = [{"pair_id": p, "dataset_row_id": f"{p}{weight}", "weight": weight} for p, weight in weights.items()]
    return {"dataset_rows": from_rows("dataset_rows", rows)}


def test_two_versions_of_a_data_set(world, tmp_path):
    lake, specs = Lake(tmp_path / "lake"), world.resources().specs
    ref = Ref("upweighted_dataset", "experiment", "first")
    common = {"input_key": "k", "spec_hash": "s"}
    first = lake.publish(
        ref,
        _rows({"a": 1.0, "b": 1.0, "c": 1.0}),
        inputs={"tito_pairs/first": "v1"},
        run=RunRecord(
            spec={"dataset": {"upweight_factor": 1.0}}, code={"version": "c1", "modules": {"m.weights": "1"}}
        ),
        **common,
    )
    second = lake.publish(
        ref,
        _rows({"b": 1.0, "c": 12.0, "d": 1.0, "e": 1.0}),
        inputs={"tito_pairs/first": "v2"},
        run=RunRecord(
            spec={"dataset": {"upweight_factor": 12.0}}, code={"version": "c2", "modules": {"m.weights": "2"}}
        ),
        **common,
    )
    lines = [line.strip() for line in explain("upweighted_dataset", "first", specs, lake)]
    assert "dataset_rows: 3 → 4 rows" in lines
    assert "spec: dataset.upweight_factor 1.0 → 12.0" in lines
    assert "input: tito_pairs/first v1 → v2" in lines and "code: m.weights" in lines
    back = [
        line.strip() for line in explain("upweighted_dataset", "first", specs, lake, (second.version, first.version))
    ]
    assert "dataset_rows: 4 → 3 rows" in back and "spec: dataset.upweight_factor 12.0 → 1.0" in back
    with pytest.raises(LakeError, match="no version 'x'"):
        list(explain("upweighted_dataset", "first", specs, lake, ("x", first.version)))


def test_unknown_names(world):
    resources = world.resources()
    with pytest.raises(SpecError, match="there is no asset 'pears'"):
        list(explain("pears", "first", resources.specs, resources.lake))
    with pytest.raises(SpecError, match="Did you mean 'first'"):
        list(explain("tito_pairs", "furst", resources.specs, resources.lake))
