"""What the web page shows of a version: figures, previews and links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etpi_assets.graph import GRAPH
from etpi_assets.orchestration.webpage import of_version
from etpi_resources.lake.lake import Lake, Ref
from tests.support import small_lake


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Lake:
    return small_lake.make(tmp_path_factory.mktemp("lake"))


def _shown(lake, asset, key="strong"):
    node = GRAPH[asset]
    manifest = lake.current(Ref(asset, node.set, key))
    return {label: getattr(value, "value", value) for label, value in of_version(node, manifest, lake).items()}


@pytest.mark.parametrize(
    ("asset", "key", "path"),
    [
        ("experiment_report", "strong", "/report/strong"),
        ("eval_metrics", "strong", "/regressions/strong"),
        ("upweighted_dataset", "strong", "/dataset/strong"),
        ("raw_rollouts", "strong_set", "/rollouts?origin=set&made_for=strong_set"),
        ("eval_rollouts", "strong", "/rollouts?origin=eval&made_for=strong"),
        ("rl_checkpoint", "reinforced", "/rollouts?origin=rl&made_for=reinforced"),
    ],
)
def test_page_links_to_the_view_of_its_data(lake, monkeypatch, asset, key, path):
    monkeypatch.setenv("ETPI_VIEW_URL", "https://view.example/")
    assert _shown(lake, asset, key)["view"] == f"https://view.example{path}"


def test_previews_of_every_asset_are_bounded_tables(lake):
    for ref in [ref for ref in lake.refs() if lake.current(ref)]:
        shown = _shown(lake, ref.asset, ref.key)
        previews = {label: value for label, value in shown.items() if label.startswith("preview/")}
        assert set(previews) == {f"preview/{table}" for table in GRAPH[ref.asset].tables}
        assert all(len(str(value)) < 20_000 for value in previews.values()), ref


def test_version_that_does_not_apply_links_nowhere(lake, monkeypatch):
    node = GRAPH["rl_checkpoint"]
    manifest = lake.current(Ref("rl_checkpoint", "experiment", "reinforced"))
    empty = replace(manifest, notes={"not_applicable": "no [rl]"})
    assert "view" not in of_version(node, empty, lake)
