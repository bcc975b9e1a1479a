"""`etpi explain`: the parts of a key, and what changed in them."""

from __future__ import annotations

import pytest

from etpi_assets.planning.planner import explain
from etpi_assets.specs.load import SpecError
from tests.support.graph import EXPERIMENT, write_spec


def test_the_parts_of_a_key_and_what_changed_in_each(world, code):
    world.make_all()
    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT + "[dataset]\nupweight_factor = 3\n")
    code["upweighted_dataset"] = 2
    resources = world.resources()
    text = "\n".join(explain("upweighted_dataset", "first", resources.specs, resources.lake))
    assert "upweighted_dataset of first: stale: its spec changed: dataset.upweight_factor 1.0 → 3.0" in text
    assert (
        "changed since: code: upweighted_dataset 1 → 2" in text
        and "    2: better" in text
        and "  input: raw_rollouts/few" in text
    )


def test_unknown_names(world):
    resources = world.resources()
    with pytest.raises(SpecError, match="'pears'"):
        list(explain("pears", "first", resources.specs, resources.lake))
    with pytest.raises(SpecError, match="'first'"):
        list(explain("tito_pairs", "furst", resources.specs, resources.lake))
