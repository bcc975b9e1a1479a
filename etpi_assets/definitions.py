"""The Dagster code location: every asset, job and resource of etpi.

Importing this module takes under three seconds: no torch, no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field

from etpi_assets.asset import recipes
from etpi_assets.automation.alerts import alert_sensor
from etpi_assets.automation.conditions import automation_sensor, with_automation
from etpi_assets.automation.import_folders import import_sensor
from etpi_assets.automation.schedule import schedules
from etpi_assets.dagster_private import place_in_timeline
from etpi_assets.graph import GRAPH
from etpi_assets.jobs import build_jobs
from etpi_assets.materialize import RESOURCE, build_asset
from etpi_assets.resources import CONCURRENCY, Resources
from etpi_assets.runs.console import console_logger
from etpi_assets.specs.load import Specs, load_specs
from etpi_assets.specs.shown import shown_specs
from etpi_resources.cluster.settings import cluster
from etpi_resources.lake.lake import Lake


class EtpiResource(dg.ConfigurableResource):
    """Dagster's form of `Resources`; none of its settings changes a result."""

    concurrency: int = Field(default=CONCURRENCY, description="Rollouts at once. It does not change results.")

    def create_resource(self, context: dg.InitResourceContext) -> Resources:
        _place(context)
        return Resources(lake=Lake.open(), concurrency=self.concurrency)


def executor() -> dg.ExecutorDefinition:
    """Return what runs the steps: this process, or on a cluster the nodes that offer what a step needs."""
    if cluster() is None:
        return dg.in_process_executor
    from etpi_assets.placement.executor import node_executor  # needs the packages of `etpi[cluster]`

    return node_executor


def resource_of(resources: Resources) -> dg.ResourceDefinition:
    """Return the resource of runs in this process that use the given resources."""

    def create(context: dg.InitResourceContext) -> Resources:
        _place(context)
        return resources

    return dg.ResourceDefinition(create, description=EtpiResource.__doc__)


def _place(context: dg.InitResourceContext) -> None:
    if context.run is not None and context.instance is not None:
        place_in_timeline(context.instance, context.run)


def build_defs(specs: Specs | None = None, resource_overrides: Mapping[str, Any] | None = None) -> dg.Definitions:
    """Build the definitions for the given specs (default: the shipped specs and the user's)."""
    specs = specs or load_specs()
    return dg.Definitions(
        assets=with_automation([build_asset(recipe, specs) for recipe in recipes().values()]),
        jobs=build_jobs(specs),
        sensors=[automation_sensor(), import_sensor(), alert_sensor()],
        schedules=schedules(specs),
        resources={RESOURCE: EtpiResource(), **(resource_overrides or {})},
        executor=executor(),
        loggers={"console": console_logger},
    )


def shown_on_page() -> Specs:
    """Return the specs whose partitions the web page offers; every run reads all specs."""
    lake = Lake.open()
    return shown_specs(
        load_specs(),
        lambda name: {key for node in GRAPH.values() if node.set == name for key in lake.keys(node.name, name)},
    )


defs = build_defs(shown_on_page())
