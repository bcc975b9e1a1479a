"""The Dagster code location: every asset, job and resource of etpi.

Importing this module takes under three seconds: no torch, no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field

from etpi_assets.asset import asset_definitions
from etpi_assets.graph import GRAPH
from etpi_assets.orchestration.experiment_inputs import experiment_inputs
from etpi_assets.orchestration.jobs import build_jobs, schedules
from etpi_assets.orchestration.materialize import RESOURCE, build_asset
from etpi_assets.resources import CONCURRENCY, Resources
from etpi_assets.specs.load import Specs, load_specs
from etpi_assets.specs.shown import shown_specs
from etpi_resources.backend import backend
from etpi_resources.lake.lake import Lake


class EtpiResource(dg.ConfigurableResource):
    """Dagster's form of `Resources`; none of its settings changes a result."""

    concurrency: int = Field(default=CONCURRENCY, description="Rollouts at once. It does not change results.")

    def create_resource(self, context: dg.InitResourceContext) -> Resources:
        return Resources(lake=Lake.open(), concurrency=self.concurrency)


def executor() -> dg.ExecutorDefinition:
    """Return what runs the steps: this process, or on a cluster the nodes that offer what a step needs."""
    elsewhere = backend()
    return elsewhere.step_executor() if elsewhere else dg.in_process_executor


def build_defs(specs: Specs | None = None, resource_overrides: Mapping[str, Any] | None = None) -> dg.Definitions:
    """Build the definitions for the given specs (default: the shipped specs and the user's)."""
    specs = specs or load_specs()
    definitions = asset_definitions().values()
    return dg.Definitions(
        assets=[experiment_inputs(definitions, specs), *(build_asset(each, specs) for each in definitions)],
        jobs=build_jobs(specs),
        schedules=schedules(specs),
        resources={RESOURCE: EtpiResource(), **(resource_overrides or {})},
        executor=executor(),
    )


def shown_on_page() -> Specs:
    """Return the specs whose partitions the web page offers; every run reads all specs."""
    lake = Lake.open()
    return shown_specs(
        load_specs(),
        lambda name: {key for node in GRAPH.values() if node.set == name for key in lake.keys(node.name, name)},
    )


defs = build_defs(shown_on_page())
