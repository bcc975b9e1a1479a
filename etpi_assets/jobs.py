"""Dagster jobs: the selections of `graph.JOBS`, and `bring_experiment`, which also computes an experiment's inputs."""

from __future__ import annotations

import dagster as dg

from etpi_assets.backfills import chain_backfill, page_of, wait_for
from etpi_assets.dagster_private import ExpectedFailure
from etpi_assets.graph import JOBS
from etpi_assets.partitions import PARTITION_TAG, SpecPartitions, partition_sets
from etpi_assets.planner import open_steps, plan
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
    @dg.op(required_resource_keys={"etpi"}, out=dg.Out(str, description="Id of the backfill; empty if none is needed."))
    def submit_chain(context) -> str:
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
            return ""
        backfill = chain_backfill(name, steps, context.repository_def.asset_graph, context.instance)
        context.instance.add_backfill(backfill)
        context.log.info(
            f"submitted backfill {backfill.backfill_id}: "
            + ", ".join(f"{step.asset} of {step.key} ({step.state})" for step in open_steps(steps))
        )
        context.add_output_metadata({"backfill": page_of(backfill.backfill_id)})
        return backfill.backfill_id

    @dg.op
    def wait_for_chain(context, backfill_id: str) -> None:
        """Wait until the backfill has ended; fail if it failed, and cancel it if this run is terminated."""
        if backfill_id:
            wait_for(backfill_id, context.instance, context.log.info)

    @dg.job(
        name="bring_experiment",
        partitions_def=experiments,
        description="Compute as one backfill whatever is missing or stale of an experiment and its inputs, and wait "
        "for it.",
    )
    def bring_experiment() -> None:
        wait_for_chain(submit_chain())

    return bring_experiment
