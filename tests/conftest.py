"""What every test shares: nothing of the user's own environment or data."""

from __future__ import annotations

import pytest
from made_graph import World

from etpi_assets import materialize
from etpi_assets.graph import GRAPH
from etpi_assets.specs import planner


@pytest.fixture(autouse=True)
def _nothing_of_the_users(tmp_path_factory, monkeypatch):
    for name in ("ETPI_SPECS", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ETPI_DATA", str(tmp_path_factory.mktemp("lake")))


@pytest.fixture
def code(monkeypatch):
    """The code version of each asset, by name, for tests of the glue to change."""
    versions = dict.fromkeys(GRAPH, "1")
    for module in (planner, materialize):
        monkeypatch.setattr(module, "code_version", lambda node: versions[node.name])
    return versions


@pytest.fixture
def world(tmp_path, code):
    """A lake, specs and recipes for tests of the glue."""
    return World(tmp_path)
