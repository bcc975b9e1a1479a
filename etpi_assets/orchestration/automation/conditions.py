"""Declarative automation: assets that cost no model time follow their inputs."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from etpi_assets.asset import MACHINE_RESOURCES
from etpi_assets.graph import GRAPH
from etpi_assets.orchestration.materialize import EXPERIMENT_INPUTS

SENSOR = "cheap_assets_follow_inputs"
EXPENSIVE = frozenset({"tasks"} | {name for name, node in GRAPH.items() if node.lock in MACHINE_RESOURCES})
"""Assets that run a model, sandboxes or a trainer; only a person or a schedule starts them."""
AUTOMATED = tuple(name for name in GRAPH if name not in EXPENSIVE)
_REPORTS = ("experiment_report", "model_card")


def condition_of(name: str) -> dg.AutomationCondition | None:
    """Return when an asset is computed by itself; None for an expensive one.

    A partition is requested once its inputs exist, and again after an input was materialized, when nothing upstream is
    in progress. A report waits for new metrics, so that it never describes a data set whose student does not exist. An
    asset over all experiments does not wait for the missing ones.
    """
    if name in EXPENSIVE:
        return None
    eager = dg.AutomationCondition.eager()
    if name in _REPORTS:
        return eager.replace(
            dg.AutomationCondition.any_deps_updated(),
            dg.AutomationCondition.any_deps_updated().allow(dg.AssetSelection.assets("eval_metrics")),
        ).with_label("after new metrics")
    if GRAPH[name].set == "all":
        return eager.without(~dg.AutomationCondition.any_deps_missing()).with_label("after any experiment")
    # A person or a schedule starts the computation of an experiment's inputs.
    return eager.ignore(dg.AssetSelection.assets(EXPERIMENT_INPUTS)) if name == "experiment_spec" else eager


def with_automation(assets: Sequence[dg.AssetsDefinition]) -> list[dg.AssetsDefinition]:
    """Return the assets with their conditions."""

    def automated(spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.replace_attributes(automation_condition=condition_of(spec.key.path[-1]))

    return [asset.map_asset_specs(automated) for asset in assets]


def automation_sensor() -> dg.AutomationConditionSensorDefinition:
    """Return the sensor that evaluates the conditions; it is stopped until someone starts it."""
    return dg.AutomationConditionSensorDefinition(
        SENSOR,
        target=dg.AssetSelection.assets(*AUTOMATED),
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Computes scores, data sets, metrics, reports and the leaderboard after their inputs changed. "
        "It never starts rollouts, training or evaluation.",
    )
