"""Dagster jobs: the selections of `graph.JOBS`, and `bring_experiment`, which also computes an experiment's inputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import uuid4

import dagster as dg

from etpi_assets.dagster_private import (
    AssetGraph,
    ExpectedFailure,
    PartitionBackfill,
    PartitionRangeSelector,
    PartitionsByAssetSelector,
    PartitionsSelector,
)
from etpi_assets.graph import JOBS
from etpi_assets.partitions import PARTITION_TAG, SpecPartitions, partition_sets
from etpi_assets.planner import Step, open_steps, plan
from etpi_assets.specs.load import SpecError, Specs

_DESCRIPTIONS = {
    "prepare_suite": "Make a suite's tasks and prove them.",
    "collect_rollouts": "Collect or import a rollout set, and score it.",
    "build_dataset": "From scored rollouts to the sequences an experiment trains on.",
    "train": "Train an experiment's checkpoints.",
    "evaluate": "Probe and evaluate an experiment's checkpoints, and report.",
    "run_experiment": "An experiment from its scored rollouts to the leaderboard. Its rollout sets must exist.",
    "publish_catalog": "The leaderboard, the teacher ceiling and the DuckDB file.",
}


def build_jobs(specs: Specs) -> list[dg.JobDefinition | dg.UnresolvedAssetJobDefinition]:
    """Return every job, its partitions taken from the specs."""
    sets = partition_sets(specs)
    jobs: list[dg.JobDefinition | dg.UnresolvedAssetJobDefinition] = [
        dg.define_asset_job(
            name,
            dg.AssetSelection.assets(*assets),
            partitions_def=sets.get(set_name),
            description=_DESCRIPTIONS[name],
        )
        for name, (set_name, assets) in JOBS.items()
    ]
    return [*jobs, _bring_experiment(sets["experiment"])]


def _bring_experiment(experiments: SpecPartitions) -> dg.JobDefinition:
    @dg.op(required_resource_keys={"etpi"})
    def submit_chain(context) -> None:
        """Submit the missing and stale partitions of an experiment as one backfill."""
        resources = context.resources.etpi
        name = context.run.tags.get(PARTITION_TAG, "")
        try:
            steps = plan(name, resources.specs, resources.lake)
        except SpecError as error:
            raise ExpectedFailure(str(error)) from None
        if invalid := [step for step in steps if step.state == "invalid"]:
            raise ExpectedFailure("\n".join(step.reason for step in invalid))
        if not open_steps(steps):
            context.log.info(f"{name}: nothing is missing or stale")
            return
        backfill = chain_backfill(name, steps, context.repository_def.asset_graph, context.instance)
        context.instance.add_backfill(backfill)
        context.log.info(
            f"submitted as backfill {backfill.backfill_id}; it needs the daemon that `make ui` runs: "
            + ", ".join(f"{step.asset} of {step.key} ({step.state})" for step in open_steps(steps))
        )

    @dg.job(
        name="bring_experiment",
        partitions_def=experiments,
        description="Submit as one backfill whatever is missing or stale of an experiment and its inputs.",
    )
    def bring_experiment() -> None:
        submit_chain()

    return bring_experiment


def chain_backfill(
    experiment: str, steps: Sequence[Step], asset_graph: AssetGraph, instance: dg.DagsterInstance
) -> PartitionBackfill:
    """Build one backfill of exactly the partitions that are not ok, followed by the tables across experiments.

    Dagster's web page can only backfill assets with different partitions over all partitions of each; see
    `dagster_private` for the classes used here.
    """
    keys: dict[str, list[str]] = {asset: [] for asset in JOBS["publish_catalog"][1]}
    for step in open_steps(steps):
        keys.setdefault(step.asset, []).append(step.key)
    selectors = [
        PartitionsByAssetSelector(
            asset_key=dg.AssetKey(asset),
            partitions=PartitionsSelector([PartitionRangeSelector(key, key) for key in names]) if names else None,
        )
        for asset, names in keys.items()
    ]
    return PartitionBackfill.from_partitions_by_assets(
        backfill_id=uuid4().hex[:8],
        asset_graph=asset_graph,
        backfill_timestamp=time.time(),
        tags={"etpi/experiment": experiment},
        dynamic_partitions_store=instance,
        partitions_by_assets=selectors,
        title=f"bring {experiment}",
        description=None,
        run_config=None,
    )
