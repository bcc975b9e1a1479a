"""The first asset of `run_experiment`: it brings the suites and rollout sets of an experiment up to date.

Dagster runs one partition of one set at a time, and an experiment reads several of other sets. So this asset computes
them itself and logs for each the events of the asset's own run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import dagster as dg

from etpi_assets.asset import AssetDefinition
from etpi_assets.checks import is_blocking
from etpi_assets.graph import GRAPH
from etpi_assets.orchestration.materialize import (
    EXPERIMENT_INPUTS,
    OWNER,
    RESOURCE,
    check_results,
    compute,
    dependencies,
    expected_failures,
    partition_of,
    rebuild_of,
    refuse_blocked,
)
from etpi_assets.orchestration.partitions import partition_sets
from etpi_assets.planning.planner import open_steps, plan, upstream_refs
from etpi_assets.planning.versions import asset_version
from etpi_assets.resources import require_hardware
from etpi_assets.specs.load import SpecError, Specs
from etpi_resources.hashes import json_hash
from etpi_resources.lake.lake import Lake, Manifest, Ref
from etpi_resources.process.progress import acting_for


def experiment_inputs(definitions: Iterable[AssetDefinition], specs: Specs) -> dg.AssetsDefinition:
    """Build the asset from the definitions of all assets; its partitions are the experiments."""
    by_name = {definition.node.name: definition for definition in definitions}

    @dg.asset(
        name=EXPERIMENT_INPUTS,
        group_name="specs",
        description="The suites and rollout sets of an experiment, brought up to date under their own partitions.",
        owners=[OWNER],
        tags={"etpi/set": "experiment"},
        partitions_def=partition_sets(specs)["experiment"],
        required_resource_keys={RESOURCE},
    )
    def compute_inputs(context):
        resources = getattr(context.resources, RESOURCE)
        specs, lake = resources.specs, resources.lake
        with expected_failures(EXPERIMENT_INPUTS):
            experiment = partition_of(context, "experiment", specs)
            require_hardware(specs.get("experiment", experiment), experiment)
            steps = plan(experiment, specs, lake, rebuild_of(context.run))
            if invalid := [step.reason for step in steps if step.state == "invalid"]:  # the run would stop later
                raise SpecError("\n".join(invalid))
        stale = {(step.set, step.key) for step in open_steps(steps) if step.set != "experiment"}
        computed = [step for step in steps if (step.set, step.key) in stale]  # finished ones too: they are logged
        with acting_for(experiment):
            for step in computed:
                _bring(by_name[step.asset], step.key, context, specs, lake)
        inputs = {f"{s.asset}/{s.key}": _version(lake, s.asset, s.key) for s in steps if s.set != "experiment"}
        return dg.MaterializeResult(
            data_version=dg.DataVersion(json_hash(inputs)), metadata={"inputs": inputs, "skipped": not computed}
        )

    return compute_inputs


def _bring(definition: AssetDefinition, key: str, context: dg.AssetExecutionContext, specs: Specs, lake: Lake) -> None:
    """Bring a partition up to date, and log its materialization and checks under its own partition.

    Raises:
        dg.Failure: it cannot be computed, or it is blocked.
    """
    name = definition.node.name
    outcome, metadata = compute(definition, key, context)
    tags = version_tags(outcome.manifest, specs, lake, context.instance)
    context.log_event(dg.AssetMaterialization(name, partition=key, metadata=metadata, tags=tags))
    for result in check_results(definition, key, outcome):
        evaluation = dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey(name),
            check_name=str(result.check_name),
            passed=result.passed,
            metadata=result.metadata,
            severity=result.severity,
            description=result.description,
            blocking=is_blocking(name, str(result.check_name)),
            partition=key,
        )
        context.log_event(evaluation)  # pyright: ignore[reportArgumentType] - its type does not name what it takes
    refuse_blocked(outcome)


def version_tags(manifest: Manifest, specs: Specs, lake: Lake, instance: dg.DagsterInstance) -> Mapping[str, str]:
    """Return the tags by which Dagster knows of a materialization's code, data and inputs.

    Dagster adds them to the results that an asset yields, not to logged events. Of the partitions of an input, it
    hashes the versions in the order of their keys.
    """
    node, key = GRAPH[manifest.ref.asset], manifest.ref.key
    tags = {
        "dagster/code_version": asset_version(node),
        "dagster/data_version": manifest.version,
        "dagster/data_version_is_user_provided": "true",
    }
    for name in dependencies(node):
        refs = upstream_refs(node, key, specs, lake, name)
        versions = "".join(_version(lake, ref.asset, ref.key) for ref in sorted(refs, key=lambda ref: ref.key))
        last = instance.fetch_materializations(dg.AssetKey(name), limit=1).records
        tags[f"dagster/input_data_version/{name}"] = hashlib.sha256(versions.encode()).hexdigest()
        tags[f"dagster/input_event_pointer/{name}"] = str(last[0].storage_id) if last else "NULL"
    return tags


def _version(lake: Lake, asset: str, key: str) -> str:
    current = lake.current(Ref(asset, GRAPH[asset].set, key))
    return current.version if current else ""
