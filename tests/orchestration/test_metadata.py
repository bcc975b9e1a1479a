"""What the web page shows of a version: figures, plots, previews and links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etpi_assets.graph import GRAPH
from etpi_assets.orchestration.webpage import floats, of_version
from etpi_resources.lake.lake import Lake, Ref
from tests.support import small_lake


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Lake:
    lake = small_lake.make(tmp_path_factory.mktemp("lake"))
    pooled = [row | {"n": 24, "unit": "pair", "interval": "wilson", "excluded": 0} for row in ROWS]
    small_lake.put(lake, "eval_metrics", "follow_up", {"metrics": pooled})
    return lake


def _shown(lake, asset, key="strong"):
    node = GRAPH[asset]
    manifest = lake.current(Ref(asset, node.set, key))
    return {label: getattr(value, "value", value) for label, value in of_version(node, manifest, lake).items()}


def _row(role, decoding, metric, value, seed=None):
    row = {"experiment": "e", "checkpoint_role": role, "decoding": decoding, "metric": metric, "seed": seed}
    return row | {"value": value, "ci_low": max(0, value - 0.1), "ci_high": min(1, value + 0.1)}


ROWS = [
    _row("base", "greedy", "solved", 0.875),
    _row("sft", "greedy", "solved", 0.75),
    _row("sft", "greedy", "solved", 0.1, seed=0),
    _row("sft", "t1", "solved", 0.5),
    _row("base", "t1", "solved", 0.83),
    _row("teacher", "as_rolled_out", "solved", 0.95),
    _row("base", "greedy", "output_tokens_per_turn", 38.9),
]


def test_plotted_figures_are_pooled_and_name_role_and_decoding():
    values = floats(ROWS)
    assert values["base greedy solved"] == 0.875 and values["sft greedy solved"] == 0.75
    assert values["sft greedy solved minus base"] == -0.125
    assert all(isinstance(value, float) for value in values.values())


def test_evaluations_page_leads_with_links_and_figures(lake):
    shown = _shown(lake, "eval_metrics", "follow_up")
    assert list(shown)[0] == "view"
    assert shown["view"] == "http://localhost:3001/regressions/follow_up"
    assert list(shown)[-1] == "sft t1 solved minus base", "what is only plotted comes last"


@pytest.mark.parametrize(
    ("asset", "key", "path"),
    [
        ("experiment_report", "strong", "/report/strong"),
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
