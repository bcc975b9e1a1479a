"""The code location: every asset, job and resource of etpi.

Belongs here: putting them together. Does not belong here: anything else. Importing this takes under three seconds: no
torch, no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from etpi_assets.console import console_logger
from etpi_assets.jobs import build_jobs
from etpi_assets.materialize import RESOURCE, build_asset
from etpi_assets.resources import Resources
from etpi_assets.specs.load import Specs, load_specs
from etpi_resources.lake import Lake


class EtpiResource(dg.ConfigurableResource):
    """What a run has at hand. Its settings are operational: none changes a result."""

    concurrency: int = 4

    def create_resource(self, context: dg.InitResourceContext) -> Resources:
        return Resources(lake=Lake.open(), concurrency=self.concurrency)


def _recipes():
    import importlib

    found = []
    for stage in ("specs", "tasks", "rollouts", "scoring", "curation", "training", "evaluation", "reports"):
        try:
            found += importlib.import_module(f"etpi_assets.{stage}.assets").ASSETS
        except ImportError as error:
            print("not yet:", stage, error)
    return found


def build_defs(specs: Specs | None = None, resource_overrides: Mapping[str, Any] | None = None) -> dg.Definitions:
    """The definitions for a reading of the specs (default: the shipped ones and the user's)."""
    specs = specs or load_specs()
    return dg.Definitions(
        assets=[build_asset(recipe, specs) for recipe in _recipes()],
        jobs=build_jobs(specs),
        resources={RESOURCE: EtpiResource(), **(resource_overrides or {})},
        executor=dg.in_process_executor,
        loggers={"console": console_logger},
    )


defs = build_defs()
