"""Declarative automation: cheap assets follow their inputs, expensive ones never start by themselves."""

from __future__ import annotations

import dagster as dg
import pytest

from etpi_assets.asset import asset_definitions
from etpi_assets.graph import GRAPH
from etpi_assets.orchestration.automation.conditions import AUTOMATED, EXPENSIVE, automation_sensor, with_automation
from etpi_assets.orchestration.materialize import build_asset
from etpi_assets.specs.load import Specs, load_shipped

KEYS = {
    "suite": "coop_tiny_shared",
    "rollout_set": "coop_tiny_shared_strong",
    "experiment": "plan_first_tiny",
    "all": None,
}
SPECS = {(kind, KEYS[kind]) for kind in ("suite", "rollout_set")} | {("rollout_set", "coop_tiny_shared_weak")}


def _definitions(experiments):
    known = SPECS | {("experiment", name) for name in experiments}
    specs = Specs(entry for entry in load_shipped().entries() if (entry.set, entry.name) in known)
    assets = [build_asset(definition, specs) for definition in asset_definitions().values()]
    return dg.Definitions(assets=with_automation(assets), resources={"etpi": dg.ResourceDefinition.none_resource()})


class Ticks:
    """The automation sensor over a lake in which one experiment is complete and another has nothing."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.definitions = _definitions(["plan_first_tiny", "plan_first_tiny_weak"])
        self._instance, self._cursor = instance, None
        for name, node in GRAPH.items():
            self.materialize(name, KEYS[node.set])
        self.first = self.tick()

    def materialize(self, asset: str, partition: str | None) -> None:
        self._instance.report_runless_asset_event(dg.AssetMaterialization(asset, partition=partition))

    def tick(self) -> set[str]:
        """Return "asset/partition" for all that the tick requests."""
        result = dg.evaluate_automation_conditions(self.definitions, self._instance, cursor=self._cursor)
        self._cursor = result.cursor
        found = set()
        for name, node in GRAPH.items():
            keys = result.get_requested_partitions(dg.AssetKey(name))
            found |= {f"{name}/{key}" if node.set != "all" else name for key in keys}
        return found


@pytest.fixture
def ticks():
    with dg.DagsterInstance.ephemeral() as instance:
        yield Ticks(instance)


def test_switching_on_requests_nothing_and_a_new_experiment_gets_its_data_set(ticks):
    assert ticks.first == set()
    ticks.definitions = _definitions(["plan_first_tiny", "plan_first_tiny_weak", "plan_first_tiny_lora"])
    requested = ticks.tick()
    assert {"experiment_spec/plan_first_tiny_lora", "upweighted_dataset/plan_first_tiny_lora"} <= requested
    assert "eval_metrics/plan_first_tiny_lora" not in requested, "it has no evaluation"
    assert not [name for name in requested if "weak" in name]


def test_new_rollouts_update_scores_data_and_metrics_and_start_no_training(ticks):
    ticks.materialize("raw_rollouts", "coop_tiny_shared_strong")
    requested = ticks.tick()
    assert {"scored_rollouts/coop_tiny_shared_strong", "upweighted_dataset/plan_first_tiny"} <= requested
    assert {name.split("/")[0] for name in requested} <= set(AUTOMATED)
    assert ticks.tick() == set(), "a request is made once"


def test_report_ignores_a_new_data_set_and_follows_metrics(ticks):
    ticks.materialize("upweighted_dataset", "plan_first_tiny")
    assert "experiment_report/plan_first_tiny" not in ticks.tick()
    assert ticks.tick() == set()
    ticks.materialize("eval_metrics", "plan_first_tiny")
    assert {"experiment_report/plan_first_tiny", "leaderboard", "catalog"} <= ticks.tick()


def test_automation_is_off_until_someone_starts_its_sensor():
    sensor = automation_sensor()
    assert sensor.default_status is dg.DefaultSensorStatus.STOPPED
    assert set(AUTOMATED) | EXPENSIVE == set(GRAPH)
